"""Taking executions, and letting each have its turns."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psycopg

from contracts.sensitive import unless_sensitive
from orchestrator.core.machine import Machine
from orchestrator.engine.committer import LeaseLost
from orchestrator.engine.ownership import Engine, Flow, Loaded, Ownership
from orchestrator.store import executions
from orchestrator.store.database import Connection, Pool
from orchestrator.store.ending import end
from orchestrator.store.executions import Claim

AWAY = (psycopg.Error, OSError)
"""What it looks like when the database is away: wait, and try again."""


@dataclass(frozen=True, slots=True)
class Appetite:
    """How much one worker takes on: `owned_max` executions at once, `claim_max` by one claim; how often it
    looks without a hint (`poll`, ±20 %).
    """

    owned_max: int
    claim_max: int
    poll: timedelta

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return self.poll.total_seconds() * random.uniform(0.8, 1.2)  # noqa: S311  # jitter


class Claims:
    """The executions of one worker: claimed, loaded, owned, and let go.

    Nothing that the database says it gave us is forgotten: when the answer to a claim was lost, or what was
    claimed could not be read, what we own is looked up and taken up again.
    """

    def __init__(
        self, engine: Engine, pool: Pool, flows: Mapping[tuple[str, str], Flow], appetite: Appetite
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._flows = flows
        self._appetite = appetite
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()

    async def run(self, hinted: asyncio.Event) -> None:
        """Take what is due, as long as there is room: when hinted, when polled, and while there is more.

        Raises psycopg.Error when the database is away; begin anew then.
        """
        engine, appetite = self._engine, self._appetite
        async with self._pool.connection() as conn:
            await self._adopt(conn)
            while not engine.draining:
                room = appetite.owned_max - len(engine.owned)
                if room <= 0:
                    self._room.clear()
                    await self._room.wait()
                    continue
                hinted.clear()
                wanted = min(room, appetite.claim_max)
                claims = await executions.claim(
                    conn, me=engine.lease.me, definitions=list(self._flows), limit=wanted
                )
                if claims:
                    engine.clock.told(max(claim.at for claim in claims))
                    await self._load(conn, claims)
                if len(claims) < wanted:
                    await either(hinted, seconds=appetite.pause)

    async def watch_mail(self) -> None:
        """Tell executions whose local steps run of mail that came meanwhile, and of an end that they do not know."""
        while True:
            await asyncio.sleep(self._appetite.pause)
            waiting = [one for one in self._engine.owned.values() if one.waits_for_work]
            if waiting:
                async with self._pool.connection() as conn:
                    rows = await executions.standing(
                        conn, [(one.claim.tenant, one.claim.execution) for one in waiting]
                    )
                for one in waiting:
                    row = rows.get(one.claim.execution)
                    if row is not None and (
                        row.mail_received > one.mail_known or row.fence != one.claim.fence
                    ):
                        one.notice_mail()

    async def reload(self, claim: Claim, read: int | None) -> Loaded:
        """Read one execution again, its mail after `read` (None: after what its row says that it has read).

        Raises LeaseLost when it is no longer ours.
        """
        failures = 0
        one = (claim.tenant, claim.execution)
        while self._engine.lease.holds:
            try:
                async with self._pool.connection() as conn:
                    row = (await executions.standing(conn, [one])).get(claim.execution)
                    if row is None or row.owner != self._engine.lease.me or row.fence != claim.fence:
                        break
                    journal = (await executions.journals(conn, [one]))[claim.execution]
                    known = row.mail_read if read is None else read
                    mail = (await executions.unread(conn, [(*one, known)]))[claim.execution]
                    return Loaded(journal, mail, row.mail_read)
            except AWAY as error:
                failures += 1
                self._engine.observer.saw("database away", error=type(error).__name__, tries=failures)
                await asyncio.sleep(backoff(failures))
        raise LeaseLost(claim.execution)

    async def drained(self, *, seconds: float) -> None:
        """Until all is released, or `seconds` have passed."""
        for one in self._engine.owned.values():
            one.wake()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def let_go(self) -> None:
        """Stop everything where it stands; what we still own is for others to take over."""
        await end(self._tasks)
        self._engine.owned.clear()
        self._engine.parking.clear()

    # ---- from a claim to an owner --------------------------------------------------------------------------

    async def _adopt(self, conn: Connection) -> None:
        """Take up what is ours without our knowing."""
        for claim in await executions.owned_by(conn, me=self._engine.lease.me):
            if claim.execution not in self._engine.owned:
                self._engine.observer.saw("execution adopted", execution=claim.execution)
                self._own(claim, None, None)

    async def _load(self, conn: Connection, claims: Sequence[Claim]) -> None:
        """Read journals and unread mail of all `claims` at once, and let each take its turns."""
        machines: dict[str, Machine] = {}
        for claim in claims:
            machine = self._engine.parking.take(claim.execution, fence=claim.fence, position=claim.position)
            if machine is not None:
                machines[claim.execution] = machine
        cold = [(claim.tenant, claim.execution) for claim in claims if claim.execution not in machines]
        mailed = [(c.tenant, c.execution, c.mail_read) for c in claims if c.mail_received > c.mail_read]
        loaded: dict[str, Loaded] = {}
        try:
            journals = await executions.journals(conn, cold) if cold else {}
            mail = await executions.unread(conn, mailed) if mailed else {}
            loaded = {
                one.execution: Loaded(journals.get(one.execution), mail.get(one.execution, []), one.mail_read)
                for one in claims
            }
        finally:  # what could not be read here is read again by its owner
            for claim in claims:
                self._own(claim, loaded.get(claim.execution), machines.get(claim.execution))

    def _own(self, claim: Claim, loaded: Loaded | None, machine: Machine | None) -> None:
        ownership = Ownership(self._engine, claim, self._flows[claim.definition, claim.version])
        self._engine.owned[claim.execution] = ownership
        task = asyncio.create_task(ownership.run(loaded, machine))
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if self._engine.owned.get(claim.execution) is ownership:
                del self._engine.owned[claim.execution]
            self._room.set()
            if not done.cancelled() and (error := done.exception()) is not None:
                text = f"{type(error).__name__}: {unless_sensitive(str(error))}"
                self._engine.observer.saw("worker failed", execution=claim.execution, error=text)

        task.add_done_callback(over)


async def either(event: asyncio.Event, *, seconds: float) -> None:
    """Until `event` is set, or `seconds` have passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def backoff(failures: int) -> float:
    """Seconds to wait after the `failures`-th failure in a row: doubling, jittered, at most 5."""
    return min(5.0, 0.1 * 2 ** min(failures, 6)) * random.uniform(0.5, 1)  # noqa: S311  # jitter
