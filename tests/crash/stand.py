"""A deployment whose parts are killed and started again, and the orders that it serves meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import psycopg

from contracts.signature import Secret
from contracts.vault import Vault
from orchestrator import registry
from orchestrator.client import Client
from orchestrator.core.status import TERMINAL, Status
from orchestrator.store.database import Connection
from tests.acceptance.stand import LOOPBACK, free_port
from tests.cluster import Cluster
from tests.crash import traces
from tests.crash.contracts import Announced, Collected
from tests.crash.desk import CLIENT, Desk, desk
from tests.crash.flows import QUEUE
from tests.crash.outcome import Outcome, outcome_of, untold
from tests.crash.outsider import says
from tests.crash.points import NOTHING
from tests.crash.process import FLOWS
from tests.crash.scenarios import Place, Scenario
from tests.crash.services import COMMANDS, REPLIES
from tests.invariants import broken
from tests.telemetry.collector import Collector, collecting
from tests.waiting import until

TRY: Final = timedelta(seconds=2)
"""For a service to answer: a message whose relay was killed is claimed again soon after that."""
ORDER_SECONDS: Final = 90.0
"""For an order to come to its end, or to any point of it, on a machine that has much else to do."""
REST_SECONDS: Final = 0.2
"""Before a process that ended by itself is started again."""
TRIES_MAX: Final = 5
"""Of one command, by a person who is told that it failed, or whose terminal is gone."""
SLOW: Final = "connection timeout expired"
"""What a process says that ends because a busy machine let it wait too long when it started."""

STARTED: Final = {
    "receiver": '"receiver.started"',
    "stock": "listens on",
    "bank": "listens on",
    "relay": '"relay.started"',
    "worker": '"worker started"',
    "mill": '"task worker started"',
}

NAMED: Final = "select execution_id::text from waypost.execution where business_key = %s"
STATUS: Final = "select status from waypost.execution where execution_id = %s"
NAPS: Final = """
    select count(*)
      from waypost.journal
     where execution_id = %s
       and kind = 'asked'
       and path like '%%nap'
"""
LEDGER: Final = "create table ledger (line int generated always as identity, item text not null)"
"""The application's own table: `tests/crash/flows.py` writes it."""
ORPHANED: Final = """
    update waypost.inbox
       set shelf_until = now()
     where type = %s
       and key = %s
       and not taken
"""
"""What nobody waited for while it was kept."""
ORPHAN: Final = "select inbox_id::text from waypost.inbox where type = %s and key = %s and not taken"
WAITS: Final = "select count(*) from waypost.wait where execution_id = %s"
ASKED: Final = "select count(*) from waypost.approval where execution_id = %s"
OPEN_AGAIN: Final = "update waypost.endpoint set state = 'enabled' where state = 'disabled'"


@dataclass(slots=True)
class Stand:
    """One process of each role, a worker of queues, and two services. Each is started again whenever it ends."""

    desk: Desk
    conn: Connection
    parts: Mapping[str, Sequence[str]]
    collector: Collector | None = None
    executions: list[str] = field(default_factory=list[str])
    falls: list[str] = field(default_factory=list[str])
    """Ends that nobody had asked for."""
    ending: bool = False

    async def keep(self, part: str) -> None:
        while not self.ending:
            code = await self.desk.run(part, self.parts[part])
            if code in {0, -signal.SIGKILL}:
                continue
            last = self.desk.said(part)[-1000:]
            if SLOW not in last:
                self.falls.append(f"{part} ended with code {code}: {last}")
            await asyncio.sleep(REST_SECONDS)

    async def started(self, *, times: Mapping[str, int] | None = None) -> None:
        """Until every part works, having been started more often than `times`."""

        async def works(part: str) -> bool:
            again = self.desk.starts.get(part, 0) > (times or {}).get(part, 0)
            return again and STARTED[part] in self.desk.said(part)

        for part in self.parts:
            await self._until(lambda part=part: works(part), f"the start of {part}")

    async def restart(self) -> None:
        """Ask every part to end, and let it come back."""
        times = dict(self.desk.starts)
        for part in self.parts:
            self.desk.signal(part, signal.SIGTERM)
        await self.started(times=times)

    # ---- orders --------------------------------------------------------------------------------------------

    async def order(self, scenario: Scenario, place: Place | None = None) -> Outcome:
        """Make an order, and have a process die at `place` meanwhile; what became of the order in the end.

        The place may be missed: if it is, nobody dies. Fails when a process ends by itself, when an invariant does
        not hold in the end, when a service did something twice without having been told that it may have, when what
        may leave once left twice, when anything left again with other bytes, and when a collector has not got all of
        it, each span once or again as the same.
        """
        name = f"{scenario.name}-{len(self.executions)}"
        before, relayed = tuple(self.executions), len(self.desk.passed("relay"))
        if place is not None:
            self.desk.arm(place.after or place.point, ignore=before)
        execution = await self._start(name, scenario)
        if place is not None:
            await self._provoke(place, execution, ignore=before)
        await self._serve(name, scenario, execution)
        if place is not None and place.point.about in {"", NOTHING}:
            await self.desk.fires(place.point)
        await self._until(self._rests, f"rest after {name}")
        if self.collector is not None:
            await self._is_exported(self.collector, execution, name)
        sent = [point.about for point in self.desk.passed("relay")[relayed:] if point.when == "sent"]
        wrong = untold(self.desk.folder, execution)
        wrong += [f"{scenario.once} left twice"] if sent.count(scenario.once) > 1 else []
        wrong += [
            f"{it} left with other bytes" for part in ("relay", "stock") for it in self.desk.changed(part)
        ]
        assert not wrong, "; ".join(wrong)
        spans = () if self.collector is None else traces.names(self.collector, execution)
        return outcome_of(await Client(self.conn).show(execution), name, self.desk.folder, spans)

    async def _start(self, name: str, scenario: Scenario) -> str:
        """Start it, by an event or by the command; again, under its key, when that did not come through."""
        await self.conn.execute(OPEN_AGAIN)
        if scenario.orphaned:
            await self._until(lambda: self._hears(Collected(order=name)), f"the receiver of {name}")
            await self.conn.execute(ORPHANED, (Collected.type_, name))
        if scenario.announced:
            await self._until(lambda: self._hears(Announced(order=name)), f"the start of {name}")
        else:
            order = {
                "id": name,
                "carrier": scenario.carrier,
                "busy": scenario.busy,
                "jammed": scenario.jammed,
            }
            await self._command("start", scenario.flow, "--key", name, "--input", json.dumps(order))
        execution = await self.one(NAMED, name)
        self.executions.append(execution)
        return execution

    async def _provoke(self, place: Place, execution: str, *, ignore: Sequence[str]) -> None:
        """See to it that the place is passed."""
        if place.provoke is not None:
            await self._until(lambda: self._naps(execution), "the nap")
            self.desk.signal(place.point.part, place.provoke)
        if place.after is not None and await self.desk.fires(place.after):
            self.desk.arm(place.point, ignore=ignore)

    async def _serve(self, name: str, scenario: Scenario, execution: str) -> None:
        """Do what people do about an order, until it is over."""
        if scenario.collected:
            await self._until(lambda: self._hears(Collected(order=name)), f"the receiver of {name}")
        if scenario.cancelled:
            await self._until(lambda: self._naps(execution), f"the nap of {name}")
            await self._decide(execution, "cancel", execution, while_in={Status.OPEN})
        if scenario.orphaned:
            await self._until(lambda: self._has(WAITS, execution), f"the wait of {name}")
            await self._offer(name)
        if scenario.approved:
            await self._until(lambda: self._has(ASKED, execution), f"the approval of {name}")
            await self._decide(execution, "decide", execution, "leave", "approve", while_in={Status.OPEN})
        if scenario.jammed:
            await self._until(lambda: self._is_in(execution, {Status.HELD}), f"{name} to be held")
            await self._decide(
                execution, "resolve", execution, "reserve/undo", "done", while_in={Status.HELD}
            )
        await self._until(lambda: self._is_in(execution, TERMINAL), f"the end of {name}")

    async def _offer(self, name: str) -> None:
        """Offer an event again, as long as nobody has it."""

        async def still() -> bool:
            return await self.one(ORPHAN, Collected.type_, name) is not None

        orphan = await self.one(ORPHAN, Collected.type_, name)
        await self._command("inbox", "redrive", orphan, "--by", "ada", still=still)

    async def _decide(self, execution: str, *command: str, while_in: AbstractSet[str]) -> None:
        """Give an order, as long as it makes sense."""

        async def makes_sense() -> bool:
            return await self._is_in(execution, while_in)

        await self._command(*command, "--by", "ada", "--reason", "it must be", still=makes_sense)

    async def _command(self, *command: str, still: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Give a command; again, when it did not come through, if `still` says so."""
        codes: list[int] = []
        while 0 not in codes and (still is None or await still()):
            assert len(codes) < TRIES_MAX, f"{command} ended with {codes}: {self.desk.said(CLIENT)}"
            codes.append(await self.desk.say(*command))

    async def _hears(self, event: Announced | Collected) -> bool:
        """Whether the receiver takes an event that somebody outside posts, once."""
        return await asyncio.to_thread(says, event, environment=self.desk.environment)

    # ---- looking -------------------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait, as long as nothing ends by itself."""

        async def holds() -> bool:
            assert not self.falls, "; ".join(self.falls)
            return await condition()

        await until(holds, what=what, seconds=ORDER_SECONDS)

    async def _is_in(self, execution: str, states: AbstractSet[str]) -> bool:
        return await self.one(STATUS, execution) in states

    async def _has(self, query: str, execution: str) -> bool:
        return await self.one(query, execution) > 0

    async def _naps(self, execution: str) -> bool:
        return await self.one(NAPS, execution) == 1

    async def _rests(self) -> bool:
        return await broken(self.conn, at_rest=True) == []

    async def _is_exported(self, collector: Collector, execution: str, name: str) -> None:
        unlike: list[str] = []

        async def exported() -> bool:
            unlike[:] = await traces.unlike(self.conn, collector, execution)
            return not unlike

        try:
            await self._until(exported, f"the export of {name}")
        except AssertionError as error:
            raise AssertionError("; ".join([str(error), *unlike])) from None

    async def one(self, query: Any, *values: object) -> Any:
        row = await (await self.conn.execute(query, values)).fetchone()
        return None if row is None else row[0]


# ---- setting up ----------------------------------------------------------------------------------------------


async def register(conn: Connection, environment: Mapping[str, str], ports: Mapping[str, int]) -> None:
    """The endpoints of both services, and the sender that posts."""
    vault = Vault.from_text(environment["WAYPOST_SECRET_KEY"])
    for name, service in (("stock", "stock"), ("carrier", "stock"), ("bank", "bank")):
        await registry.add_endpoint(
            conn,
            vault,
            name=name,
            url=f"http://127.0.0.1:{ports[service]}/waypost",
            secret=Secret.parse(environment[COMMANDS]),
            replies_from=service,
            patience=TRY,
            allow=[ip_network(LOOPBACK)],
        )
    await registry.add_sender(conn, vault, name="stock", secret=Secret.parse(environment[REPLIES]))


@asynccontextmanager
async def stand(dsn: str, folder: Path, collector: Collector | None = None) -> AsyncGenerator[Stand]:
    """A deployment on the migrated database at `dsn`, which is starting. Leaving lets it drain."""
    ports = {"stock": free_port(), "bank": free_port()}
    parts = {
        "receiver": ["receiver"],
        "stock": ["service", "stock", str(ports["stock"])],
        "bank": ["service", "bank", str(ports["bank"])],
        "relay": ["relay"],
        "worker": ["worker"],
        "mill": ["tasks", FLOWS, "--queue", QUEUE],
    }
    async with (
        desk(dsn, folder, {} if collector is None else collector.environment) as at,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
        asyncio.TaskGroup() as group,
    ):
        await register(conn, at.environment, ports)
        await conn.execute(LEDGER)
        found = Stand(at, conn, parts, collector)
        for part in parts:
            group.create_task(found.keep(part))
        try:
            yield found
        finally:
            found.ending = True
            for part in parts:
                at.signal(part, signal.SIGTERM)


@asynccontextmanager
async def stands(
    cluster: Cluster, folder: Path, number: int, *, traced: bool = False
) -> AsyncGenerator[list[Stand]]:
    """So many deployments at work, each on a database of its own; `traced`, each with a collector of its own."""
    names = [cluster.create() for _ in range(number)]
    async with AsyncExitStack() as stack:
        collectors = [stack.enter_context(collecting()) if traced else None for _ in names]
        starting = [
            stand(cluster.dsn(name), folder / name, collector)
            for name, collector in zip(names, collectors, strict=True)
        ]
        found = [await stack.enter_async_context(one) for one in starting]
        for one in found:
            await one.started()
        yield found
    for name in names:
        cluster.drop(name)
