"""Everything at once, by chance: workers, relays, receivers, sweepers, and somebody who kills them.

All act through the project's own functions, each on a connection of its own, for as long as they are told. Workers
die with what they own, and come back later to commit it; relays die between sending and settling, or settle too
late; connections are cut in the middle of a statement, and whoever had one finds out what came of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, LiteralString
from uuid import UUID, uuid4

import psycopg

from orchestrator.store import commits, executions, starts, workers
from orchestrator.store.commits import KEYS_MAX, EventKey, NewMessage, NewWait, Turn, keys_locked
from orchestrator.store.database import Connection
from orchestrator.store.executions import Mail
from receiver import inbox
from receiver.inbox import MailItem
from relay import outbox
from relay.outbox import Message
from tests.explorer.moves import (
    DELIVERED,
    REACHED,
    REFUSED,
    UNREACHED,
    claim_messages,
    new_execution,
    result,
)
from tests.invariants import broken
from tests.store.world import FLOW, Held, asked, closed, event, message, order, reply, wait

LEASE: Final = timedelta(milliseconds=1500)
"""Of a worker; it renews before each batch."""
CLAIM: Final = timedelta(milliseconds=60)
"""Of a relay's claim."""
KEYS: Final = 30
BUSINESS_KEYS: Final = 400
PAUSE_SECONDS: Final = 0.004
AUDIT_SECONDS: Final = 10.0

Act = Callable[[Connection], Awaitable[None]]


@dataclass(slots=True)
class Storm:
    """What all that act share: chance, what they know of each other, and what has happened."""

    dsn: str
    seconds: float
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter[str])
    executions: deque[UUID] = field(default_factory=lambda: deque[UUID](maxlen=400))
    sent: deque[UUID] = field(default_factory=lambda: deque[UUID](maxlen=400))
    tries: Counter[UUID] = field(default_factory=Counter[UUID])
    reached: set[UUID] = field(default_factory=set[UUID])
    complaints: list[str] = field(default_factory=list[str])
    backends: dict[str, int] = field(default_factory=dict[str, int])
    ends_at: float = 0.0

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.ends_at and not self.complaints

    def maybe(self, probability: float) -> bool:
        return self.chance.random() < probability

    async def run(self) -> None:
        """Let everybody act until the time is over or something is broken; what it is stands in `complaints`."""
        self.ends_at = time.monotonic() + self.seconds
        acts: list[tuple[str, Act]] = [
            *((f"worker {n}", Worker(self).act) for n in range(3)),
            *((f"relay {n}", self.relay) for n in range(3)),
            *((f"receiver {n}", self.receive) for n in range(2)),
            *((f"sweeper {n}", self.sweep) for n in range(2)),
            ("client", self.start_and_order),
        ]
        async with asyncio.TaskGroup() as group:
            for name, act in acts:
                group.create_task(self.keep(name, act))
            group.create_task(self.kill())
            group.create_task(self.audit())

    async def keep(self, name: str, act: Act) -> None:
        """Let `act` go on, on a new connection whenever the old one was cut."""
        while self.goes_on:
            try:
                async with await Connection.connect(self.dsn, autocommit=True) as conn:
                    self.backends[name] = conn.info.backend_pid
                    while self.goes_on:
                        await act(conn)
                        await asyncio.sleep(self.chance.random() * PAUSE_SECONDS)
            except psycopg.Error as error:
                self.done["connections cut"] += 1
                if not was_cut(error):
                    self.complaints.append(f"{name}: {error.sqlstate} {error}")

    async def kill(self) -> None:
        """Cut somebody's connection now and then."""
        async with await Connection.connect(self.dsn, autocommit=True) as conn:
            while self.goes_on:
                await asyncio.sleep(self.chance.random() * 0.2)
                for victim in self.chance.sample(list(self.backends.values()), min(1, len(self.backends))):
                    await conn.execute("select pg_terminate_backend(%s)", (victim,))

    async def audit(self) -> None:
        """Look now and then whether everything holds in what is committed."""
        async with await Connection.connect(self.dsn, autocommit=True) as conn:
            while self.goes_on:
                await asyncio.sleep(min(AUDIT_SECONDS, self.seconds / 2))
                self.complaints += await broken(conn, scripted=True)
                self.done["audits"] += 1

    # -- those who need no memory --------------------------------------------------------------------------

    async def start_and_order(self, conn: Connection) -> None:
        keys = self.chance.sample(range(BUSINESS_KEYS), self.chance.randint(1, 4))
        new = [new_execution(f"k{key}", self.chance.choice([1, 1, 1, 2])) for key in keys]
        for outcome, execution in await starts.start(conn, [*new, new_execution(None, 1)]):
            self.done[f"start {outcome}"] += 1
            self.executions.append(UUID(execution))
        to = self.chance.sample(self.executions, min(3, len(self.executions)))
        await self.post(conn, [order(str(uuid4()), execution) for execution in to])

    async def receive(self, conn: Connection) -> None:
        """Replies to what was sent, some again and some changed; events, some under one webhook id."""
        items: list[MailItem] = []
        for to in self.chance.sample(self.sent, min(self.chance.randint(0, 4), len(self.sent))):
            data = '{"outcome": "done"}' if self.maybe(0.95) else '{"outcome": "failed"}'
            items.append(reply(f"re {to}", to, data=data))
        for _ in range(self.chance.randint(0, 5)):
            webhook = f"w{self.chance.randrange(2000)}" if self.maybe(0.3) else None
            data = f'{{"n": {self.chance.randrange(3)}}}'
            name = str(self.chance.randrange(20_000))
            items.append(event(name, key=self.key(), webhook_id=webhook, data=data))
        self.chance.shuffle(items)
        await self.post(conn, items)

    def key(self) -> str:
        return f"k{self.chance.randrange(KEYS)}"

    async def post(self, conn: Connection, items: list[MailItem]) -> None:
        """Post, and when nobody knows what came of it, post the same again."""
        if not items:
            return
        try:
            posted = await inbox.post(conn, items)
        except psycopg.Error as error:
            if not was_cut(error):
                raise
            async with await Connection.connect(self.dsn, autocommit=True) as again:
                posted = await inbox.post(again, items)
        for one in posted:
            self.done[f"mail {one.outcome}"] += 1

    async def relay(self, conn: Connection) -> None:
        """Claim, send, settle; or die in between, or come too late."""
        token = uuid4()
        try:
            claimed = await claim_messages(conn, lease=CLAIM, limit=10, token=token)
        except psycopg.Error as error:
            if was_cut(error):
                await self.give_back(token)
            raise
        tried: list[outbox.Result] = []
        for one in claimed:
            verdict = self.chance.choice([DELIVERED, DELIVERED, REACHED, UNREACHED, REFUSED])
            tried.append(result(one, verdict))
            self.send(one, reaches=verdict is not UNREACHED)
        if self.maybe(0.03):
            self.done["relay died"] += 1
            return
        if self.maybe(0.05):
            await asyncio.sleep(2 * CLAIM.total_seconds())
            self.done["settled late"] += len(tried)
        states = await outbox.settle(conn, tried)
        self.done["settled"] += len(states)
        self.done["settled, no match"] += len(tried) - len(states)

    def send(self, one: Message, *, reaches: bool) -> None:
        self.done["sent"] += 1
        self.tries[one.message_id] += 1
        if reaches:
            self.reached.add(one.message_id)
        if one.message_id not in self.sent:
            self.sent.append(one.message_id)

    async def give_back(self, token: UUID) -> None:
        """What a claim took whose answer was lost was not sent."""
        async with await Connection.connect(self.dsn, autocommit=True) as conn:
            lost = await outbox.claimed_under(conn, token=token)
            await outbox.settle(conn, [result(one, UNREACHED) for one in lost])
            self.done["claims given back"] += len(lost)

    async def sweep(self, conn: Connection) -> None:
        self.done["claims expired"] += await outbox.expire_claims(conn, limit=20)
        self.done["messages expired"] += await outbox.expire_due(conn, limit=20)
        self.done["buried"] += len(await workers.bury(conn))
        self.done["taken over"] += len(await workers.take_over(conn, limit=20))


def was_cut(error: psycopg.Error) -> bool:
    """Whether somebody ended the connection: what it was about may have happened, or not."""
    return isinstance(error, psycopg.OperationalError) and error.sqlstate in {None, "57P01"}


@dataclass(slots=True)
class Loaded:
    """An execution in a worker's hands, with what a turn may be about."""

    holder: Held
    mail: list[Mail]
    waits: list[NewWait]
    messages: list[UUID]


class Worker:
    """Takes executions and gives each a turn that chance decides. It dies now and then, and haunts."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._me: str | None = None
        self._ghosts: list[list[tuple[Held, Turn]]] = []

    async def act(self, conn: Connection) -> None:
        storm = self._storm
        me = await self._alive(conn)
        turns = [self._turn(one) for one in await self._load(conn, me)]
        turns = self._within_limits(turns)
        if turns and storm.maybe(0.02):
            storm.done["worker died"] += 1
            self._me = None
            self._ghosts.append(turns)
        elif turns:
            await self._commit(conn, me, turns)
        if self._ghosts and storm.maybe(0.1):
            await self._haunt(conn, self._ghosts.pop(0))

    async def _alive(self, conn: Connection) -> str:
        """Our identity, its lease renewed; a new one when that was too late."""
        if self._me is not None:
            renewed = await (await conn.execute(workers.RENEW, {"me": self._me, "lease": LEASE})).fetchone()
            if renewed is None:
                self._storm.done["lease lost"] += 1
                self._me = None
        if self._me is None:
            me = str(uuid4())
            await workers.register(conn, me=me, lease=LEASE, host="soak", definitions=[FLOW[0]])
            self._me = me
        return self._me

    async def _load(self, conn: Connection, me: str) -> list[Loaded]:
        """What is due, and what a lost answer or an unreleased turn left with us."""
        await executions.claim(conn, me=me, definitions=[FLOW], limit=8)
        mine = await executions.owned_by(conn, me=me)
        self._storm.done["claims"] += len(mine)
        loaded: list[Loaded] = []
        unread = await executions.unread(conn, [(1, one.execution, one.mail_read) for one in mine])
        for one in mine:
            waits = await conn.execute(WAITS, (one.execution,))
            messages = await conn.execute(MESSAGES, (one.execution,))
            loaded.append(
                Loaded(
                    Held(
                        UUID(one.execution),
                        me,
                        one.fence,
                        one.position,
                        one.epoch,
                        one.mail_read,
                        one.mail_received,
                    ),
                    unread[one.execution],
                    [NewWait(*row) for row in await waits.fetchall()],
                    [row[0] for row in await messages.fetchall()],
                )
            )
        return loaded

    def _turn(self, one: Loaded) -> tuple[Held, Turn]:
        """A turn that says anything, within the rules that a turn must keep."""
        storm, holder = self._storm, one.holder
        read = one.mail if storm.maybe(0.8) else one.mail[: storm.chance.randint(0, len(one.mail))]
        filled = {mail.path for mail in one.mail if mail.kind == "event"}
        over = {mail.path for mail in read if mail.kind == "event"}
        finishes = storm.maybe(0.05)
        closes = [
            closed(w.path, key=w.key, was_open=w.path not in filled)
            for w in one.waits
            if finishes or w.path in over or (w.path not in filled and storm.maybe(0.1))
        ]
        facts: list[tuple[str, str, Any]] = [("finished" if finishes else "ended", "", {})]
        messages: list[NewMessage] = []
        waits: list[NewWait] = []
        if not finishes:
            for n in range(storm.chance.choice([0, 0, 1, 1, 2])):
                path = f"m{holder.position}.{n}"
                expires_at = self._due() if storm.maybe(0.1) else None
                messages.append(message(path, at_most_once=storm.maybe(0.3), expires_at=expires_at))
                facts.append(asked(path))
            count = storm.chance.choice([0, 0, 1, 2])
            waits = [wait(f"w{holder.position}.{n}", key=storm.key()) for n in range(count)]
        back = [m for m in one.messages if storm.maybe(0.15)]
        storm.done["taken back"] += len(back)
        status = "completed" if finishes else storm.chance.choice(["open"] * 8 + ["paused", "held"])
        turn = holder.turn(
            *facts,
            mail=len(read),
            orders=sum(mail.kind == "order" for mail in read),
            status=status,
            release=status != "open" or storm.maybe(0.9),
            due=self._due() if storm.maybe(0.5) else None,
            guard=holder.mail_read + len(one.mail) if any(c.was_open for c in closes) else None,
            asks=bool(messages),
            messages=messages,
            take_back=back,
            waits=waits,
            closes=closes,
        )
        return holder, turn

    def _due(self) -> datetime:
        return datetime.now(UTC) + timedelta(milliseconds=self._storm.chance.randint(0, 50))

    def _within_limits(self, turns: list[tuple[Held, Turn]]) -> list[tuple[Held, Turn]]:
        keys: set[EventKey] = set()
        kept: list[tuple[Held, Turn]] = []
        for holder, turn in turns:
            keys |= keys_locked(turn)
            if len(keys) > KEYS_MAX:
                break
            kept.append((holder, turn))
        return kept

    async def _commit(self, conn: Connection, me: str, turns: list[tuple[Held, Turn]]) -> None:
        """Commit; when the answer is lost, the journal says what came of it, and the rest is repeated."""
        storm, batch = self._storm, [turn for _, turn in turns]
        try:
            matched = await commits.commit(conn, batch, me=me)
        except psycopg.Error as error:
            if not was_cut(error):
                raise
            async with await Connection.connect(storm.dsn, autocommit=True) as again:
                found = await commits.committed(again, batch)
                storm.done["commits looked up"] += 1
                left = [turn for turn in batch if turn.execution not in found]
                matched = found | (await commits.commit(again, left, me=me) if left else {})
        storm.done["commits"] += len(matched)
        storm.done["commits not matched"] += len(batch) - len(matched)

    async def _haunt(self, conn: Connection, turns: list[tuple[Held, Turn]]) -> None:
        """A dead worker commits what it had. Whatever was taken over meanwhile must stay as it is."""
        storm = self._storm
        mine = [turn for _, turn in turns]
        now = await executions.standing(conn, [(1, turn.execution) for turn in mine])
        lost = {turn.execution for turn in mine if now[turn.execution].fence != turn.fence}
        matched = await commits.commit(conn, mine, me=turns[0][0].me)
        storm.done["ghosts that wrote nothing"] += len(lost - set(matched))
        storm.done["ghosts in time"] += len(matched)
        storm.complaints += [f"a stale turn of {execution} was written" for execution in lost & set(matched)]


WAITS: Final[LiteralString] = (
    "select path, type, key from waypost.wait where tenant_id = 1 and execution_id = %s::uuid"
)
MESSAGES: Final[LiteralString] = """
    select message_id
      from waypost.outbox
     where tenant_id = 1
       and execution_id = %s::uuid
       and state in ('due', 'expired', 'sending', 'delivered')
"""
