"""How many signed replies per second the receiver stores durably, beside a bare handler that keeps nothing.

A round posts new replies to the receiver and to the bare handler, in turns, over the same connections, with the same
bytes. Each reply answers a command of its own that its service has, so it is verified, stored, numbered and
wakes its execution before the receiver says 202. Afterwards the database holds as many pieces of mail as there were
202s.
"""

from __future__ import annotations

import base64
import itertools
import secrets as chance
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, LiteralString

from bench.given import BATCH, ENDPOINT, World
from bench.poster import rate_of, request_of
from bench.processes import Processes, family_seconds, processes
from bench.report import Bar, Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from contracts.envelope import STRUCTURED, decode_structured
from contracts.signature import Secret, sign
from contracts.vault import KEY_BYTES, Vault
from orchestrator import bootstrap, registry
from receiver import replies

NAME: Final = "receiver"
BARE: Final = "bare"
SETTINGS: Final[Mapping[str, str]] = {"shared_buffers": "1GB", "max_wal_size": "8GB", "min_wal_size": "2GB"}
OF_BARE_MIN: Final = 0.4
CONNECTIONS: Final = 256
WARM_UP_SECONDS: Final = 1.0
WINDOW_SECONDS: Final = 3.0
RATE_MAX: Final = 22_000
"""Replies per second that are made ready; a receiver that takes more ends the measurement with an error."""
SETTLING: Final[tuple[LiteralString, ...]] = ("vacuum (analyze)", "checkpoint")
"""Said before each round, so that what making the replies left behind is not tidied up while they are posted."""
PATH: Final = f"/events/default/{ENDPOINT}"


class NotStored(Exception):
    """The database does not hold what was said to be accepted."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Both servers at work, and what makes replies for them."""

    server: Server
    world: World
    secret: Secret
    parts: Processes
    ports: Mapping[str, int]

    def seconds(self, name: str) -> tuple[float, float]:
        """Processor time so far: of server `name`, and of the database."""
        return self.parts.all[name].seconds, family_seconds(self.server.pid)


@dataclass(frozen=True, slots=True)
class Seen:
    """One window. `cost` is processor time of the server per answer, `database` that of the database; seconds."""

    rate: float
    answers: int
    cost: float
    database: float


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """Measure `schedule.rounds` pairs of windows."""
    return bootstrap.run(measure(server, schedule, say))


async def measure(server: Server, schedule: Schedule, say: Say) -> Result:
    warm_up, window = schedule.warm_up or WARM_UP_SECONDS, schedule.window or WINDOW_SECONDS
    wanted = int(RATE_MAX * (warm_up + window))
    seen: dict[str, list[Seen]] = {BARE: [], NAME: []}
    async with stand(server) as at:
        for number in range(1, schedule.rounds + 1):
            say(f"round {number}/{schedule.rounds}: making {wanted:,} replies")
            bodies = await answers(at.world, wanted)
            for statement in SETTLING:
                await at.world.conn.execute(statement)
            for name in list(seen)[:: 1 if number % 2 else -1]:
                seen[name].append(await post(at, name, bodies, warm_up=warm_up, window=window))
            found = ", ".join(f"{name} {of[-1].rate:,.0f}/s" for name, of in seen.items())
            say(f"round {number}/{schedule.rounds}: {found}")
        await verify(at.world, sum(one.answers for one in seen[NAME]))
    return judged(seen)


@asynccontextmanager
async def stand(server: Server) -> AsyncGenerator[Stand]:
    key = base64.b64encode(chance.token_bytes(KEY_BYTES)).decode("ascii")
    with server.database(NAME) as dsn, tempfile.TemporaryDirectory(prefix="waypost-bench-") as folder:
        world = await World.on(dsn)
        async with world.conn:
            sender = await registry.add_sender(world.conn, Vault.from_text(key), name=ENDPOINT)
            environment = {
                "WAYPOST_DATABASE_URL": dsn,
                "WAYPOST_SECRET_KEY": key,
                "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
                "WAYPOST_HEALTH_ADDR": "127.0.0.1:0",
            }
            with processes(Path(folder), environment) as parts:
                yield Stand(server, world, sender.shared, parts, start(parts))


async def post(
    at: Stand, name: str, bodies: Sequence[tuple[str, bytes]], *, warm_up: float, window: float
) -> Seen:
    """Post `bodies` to one server; the bare one, which knows nothing, gets them again when they are used up."""
    requests = [signed(body, identity, at.secret, at.ports[name]) for identity, body in bodies]
    each = iter(requests) if name == NAME else itertools.cycle(requests)
    before = at.seconds(name)
    rate, statuses = await rate_of(
        at.ports[name], each, connections=CONNECTIONS, warm_up=warm_up, window=window
    )
    if set(statuses) != {202}:
        raise NotStored(f"{name} answered {dict(statuses)}, expected 202 alone")
    number = statuses.total()
    cost, database = ((b - a) / number for a, b in zip(before, at.seconds(name), strict=True))
    return Seen(rate, number, cost, database)


def start(parts: Processes) -> dict[str, int]:
    """Both servers; the port of each."""
    bare = parts.start(BARE, "bench.bare").says(r"listens on (\d+)")
    receiver = parts.start(NAME, "orchestrator", "receiver").says(
        r'"event": "receiver\.started".*"port": (\d+)'
    )
    return {BARE: int(bare[1]), NAME: int(receiver[1])}


async def answers(world: World, number: int) -> list[tuple[str, bytes]]:
    """Replies to `number` commands that were delivered, as the participant helper makes them."""
    found: list[tuple[str, bytes]] = []
    while len(found) < number:
        await world.start(BATCH)
        await world.ask(await world.claim(BATCH))
        for message in await world.send(BATCH):
            command = decode_structured(message.body)
            body = replies.done(command, source=f"/{ENDPOINT}", value={"charge": "charge-1"}).body
            found.append((decode_structured(body).id, body))
    return found


def signed(body: bytes, identity: str, secret: Secret, port: int) -> bytes:
    """The request that posts a reply."""
    timestamp = int(time.time())
    headers = {
        "Content-Type": STRUCTURED,
        "webhook-id": identity,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign([secret], message_id=identity, timestamp=timestamp, body=body),
    }
    return request_of(PATH, port, headers, body)


STORED: Final[LiteralString] = """
    select count(*) from waypost.mail m join waypost.inbox i using (inbox_id) where i.kind = 'reply'
"""


async def verify(world: World, stored: int) -> None:
    row = await (await world.conn.execute(STORED)).fetchone()
    if row != (stored,):
        raise NotStored(f"202 was said {stored:,} times; the database holds {row} pieces of mail")


def judged(seen: Mapping[str, Sequence[Seen]]) -> Result:
    pairs = list(zip(seen[NAME], seen[BARE], strict=True))
    ratio = statistics.median(ours.rate / bare.rate for ours, bare in pairs)
    return Result(
        name=NAME,
        unit="durable accepts/s",
        value=statistics.median(one.rate for one in seen[NAME]),
        versus={BARE: ratio},
        bars=[Bar("of what a bare aiohttp handler answers", ratio, least=OF_BARE_MIN)],
        headings=("server", "answers/s", "its processor µs each", "the database's µs each"),
        rows=[
            [
                name,
                spread([one.rate for one in of]),
                spread([1e6 * one.cost for one in of]),
                spread([1e6 * one.database for one in of]),
            ]
            for name, of in seen.items()
        ],
        notes=NOTES,
    )


NOTES: Final = (
    (
        f"PostgreSQL has {', '.join(f'{name} {value}' for name, value in SETTINGS.items())} here: what the replies "
        "answer was written shortly before."
    ),
    (
        f"One process each, on uvloop. The same requests go to both in turns, over {CONNECTIONS} connections, from a "
        "client that made and signed them beforehand. The ratio is the median over the pairs."
    ),
    (
        "Each is a signed reply to a command of its own that was delivered, 202 means stored, numbered and the "
        "execution woken, in a commit with fsync; what was accepted is counted in the database."
    ),
)
