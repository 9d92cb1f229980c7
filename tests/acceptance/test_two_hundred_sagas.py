"""Two hundred sagas with services of every kind, while everything of ours is killed again and again, PostgreSQL is
restarted twice under load and is away for ten seconds: nothing is lost, nothing is doubled, nothing is ever stuck, and
nobody ever holds more connections than the documents say.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from migrations import runner
from orchestrator.embedded import EmbeddedPostgres
from orchestrator.embedded.server import Postmaster
from tests.acceptance.nemesis import OWNED, Nemesis
from tests.acceptance.sagas import (
    KINDS,
    OPEN,
    TROUBLE,
    Starts,
    assert_messages_arrived_as_they_were_committed,
    assert_no_mail_was_left_unread,
    assert_replies_were_the_same_bytes_until_taken,
    assert_the_journal_agrees,
    assert_the_saga_ended_as_it_should,
    counted,
    proven_hits,
    sagas,
    summary,
    taken_back,
)
from tests.acceptance.stand import DESKS, Role, Stand, free_port, stand
from tests.acceptance.watch import MAY_HOLD, watching
from tests.cluster import fast_folder
from tests.evidence import Evidence
from tests.waiting import until

SAGAS: Final = 200
HITS: Final = 100
"""Kills by which all sagas are begun; those that wait for work begin some of them before."""
HITS_MIN: Final = 60
"""Of those, in proof of work that was interrupted; on a slow machine sagas end while a killed part comes back."""
OPEN_MIN: Final = 6
OUTAGE_SECONDS: Final = 10
ROLES: Final[Sequence[Role]] = ("receiver", "relay", "relay", "worker", "worker", "worker")
WHOM: Final[Sequence[Role]] = ("worker", "worker", "relay", "receiver", "desk")
SPARED: Final = frozenset({"worker-5"})
"""It is never killed, so that it lives through what happens to the database."""

END_SECONDS: Final = 180.0
"""For the last saga: some messages have had so many bad tries that the next one is half a minute away."""


SENDING: Final = "select count(*) from waypost.outbox where state in ('sending', 'stopping')"
FACTS: Final = "select count(*) from waypost.journal where kind <> 'started'"


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of this test's own, at a port that it keeps when it is started again."""
    server = EmbeddedPostgres(EmbeddedPostgres.temporary(within=fast_folder()).data_dir, port=free_port())
    with psycopg.connect(server.start(), autocommit=True) as conn:
        runner.migrate(conn)
    yield server
    server.remove()


@dataclass(slots=True)
class Trouble:
    """What happens to the database while the sagas run."""

    server: EmbeddedPostgres
    stand: Stand
    nemesis: Nemesis
    evidence: Evidence
    _facts: int = 0

    async def restart_at_once(self) -> None:
        await self._without(crash, what="stopped at once, and started again")

    async def restart_in_order(self) -> None:
        await self._without(EmbeddedPostgres.stop, what="stopped in order, and started again")

    async def outage(self) -> None:
        await self._without(crash, seconds=OUTAGE_SECONDS, what=f"away for {OUTAGE_SECONDS} s")

    async def _without(
        self, stop: Callable[[EmbeddedPostgres], None], *, what: str, seconds: float = 0
    ) -> None:
        """`stop` the server when there is work of every kind in hand; every part lives through it by itself."""
        await self.nemesis.rest()
        pids = self._pids()
        await until(self._is_loaded, what="work in the hands of workers and relays")
        number = await self.stand.one(OPEN, None, None)
        await asyncio.to_thread(stop, self.server)
        await asyncio.sleep(seconds)  # it is not waited for anything: this is the outage
        await asyncio.to_thread(self.server.start)
        back = time.monotonic()
        await self.stand.connect(self.server.dsn())
        self._facts = await self.stand.one(FACTS)
        await until(self._is_moving, what="the next fact of a saga")
        took = time.monotonic() - back
        self.evidence.did(f"PostgreSQL {what}, with {number} sagas open; they moved {took:.1f} s later")
        self.evidence.goes_on(f"PostgreSQL was {what}", always=True)
        assert self._pids() == pids

    def _pids(self) -> list[int]:
        assert [part.name for part in self.stand.parts if part.running.process.returncode is not None] == []
        return [part.running.process.pid for part in self.stand.parts]

    async def _is_loaded(self) -> bool:
        await self.nemesis.feed("worker")
        return await self._owned() > 0 and await self.stand.one(SENDING) > 0

    async def _is_moving(self) -> bool:
        await self.nemesis.feed("worker")
        return await self.stand.one(FACTS) > self._facts

    async def _owned(self) -> int:
        workers = [part for part in self.stand.parts if part.role == "worker"]
        return sum([await self.stand.one(OWNED, part.worker_id) for part in workers])


def crash(server: EmbeddedPostgres) -> None:
    """SIGQUIT: it leaves at once, and has to recover when it is started again."""
    running = Postmaster.over(server.cluster)
    assert running is not None
    os.kill(running.pid, signal.SIGQUIT)
    server.stop()


@pytest.mark.proof
async def test_two_hundred_sagas(
    server: EmbeddedPostgres, tmp_path: Path, seed: int, evidence: Evidence
) -> None:
    evidence.did(f"WAYPOST_SEED={seed}")
    chance, orders = random.Random(seed), sagas(SAGAS, KINDS)
    ledger = ("--seed", str(seed), "--trouble", str(TROUBLE), "--ponder", "1")
    async with stand(server.dsn(), tmp_path, roles=ROLES, ledger_options=ledger, desks=DESKS) as it:
        with watching(server.dsn(), server.port or 0, it.living) as watch:
            async with asyncio.TaskGroup() as returns:
                starts = Starts(it, orders, chance.sample(orders, SAGAS), open_min=OPEN_MIN)
                nemesis = Nemesis(it, returns, chance, starts.feed, whom=WHOM, spared=SPARED)
                trouble = Trouble(server, it, nemesis, evidence)
                planned = [trouble.restart_at_once, trouble.outage, trouble.restart_in_order]
                await strike(nemesis, starts, planned, evidence)
                await nemesis.rest()
            await all_over(it, evidence)
            views = [await it.client.show(it.started[saga.order]) for saga in orders]
            await until(lambda: nothing_owed(it), what="the last replies to be taken")

        proven = await proven_hits(it, nemesis)
        evidence.did(f"{SAGAS} sagas: {counted(Counter(view.row.status for view in views))}")
        evidence.did(f"kills that interrupted work: {counted(proven)}; cancels: {starts.cancelled}")
        evidence.did(f"services: {counted(summary(it.book()))}")
        evidence.did(
            f"connections: {watch.looks} looks ({watch.away} without the server), at most"
            f" {', '.join(f'{n} of a {role}' for role, n in watch.most.items() if MAY_HOLD[role])};"
            f" {watch.most_of_all} of all; {watch.left_behind} left behind by killed processes"
        )
        assert watch.excess == []
        assert watch.stuck == []
        assert proven.total() >= HITS_MIN
        assert await it.at_rest() == []
        await assert_no_mail_was_left_unread(it, orders)
        await assert_messages_arrived_as_they_were_committed(it)
        unwanted = await taken_back(it)
    for saga, view in zip(orders, views, strict=True):
        assert_the_saga_ended_as_it_should(saga, view, it.book())
        assert_the_journal_agrees(view)
    assert_replies_were_the_same_bytes_until_taken(it.book(), unwanted=unwanted)
    moments = moments_in(tmp_path)
    evidence.did(f"moments: {counted(Counter(it['event'] for it in moments))}")
    assert_nothing_was_stuck_or_failed_for_another_reason(moments)


async def strike(
    nemesis: Nemesis, starts: Starts, planned: Sequence[Callable[[], Awaitable[None]]], evidence: Evidence
) -> None:
    """Kill until all sagas are begun; at equal distances between them, what is `planned` happens."""
    left, parts = list(planned), len(planned) + 1
    while starts.waiting:
        if left and starts.begun >= SAGAS * (parts - len(left)) / parts:
            await left.pop(0)()
        await nemesis.storm()
        await starts.up_to(nemesis.hits.total() / HITS)
        evidence.goes_on(f"{starts.begun} of {SAGAS} sagas begun, {nemesis.hits.total()} kills")
    for event in left:
        await event()
    await starts.cancel_the_rest()


async def all_over(it: Stand, evidence: Evidence) -> None:
    async def over() -> bool:
        number = await it.one(OPEN, None, None)
        evidence.goes_on(f"{number} of {SAGAS} sagas are not over")
        return number == 0

    await until(over, what="the end of all sagas", seconds=END_SECONDS)


async def nothing_owed(it: Stand) -> bool:
    return await it.owed() == 0


def moments_in(folder: Path) -> list[dict[str, Any]]:
    """All that the processes of ours logged; the last line of one that was killed may be cut."""
    lines = [line for log in folder.glob("*.log") for line in log.read_bytes().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]


def assert_nothing_was_stuck_or_failed_for_another_reason(moments: list[dict[str, Any]]) -> None:
    failed = [it for it in moments if it["event"] == "worker failed"]

    assert [it for it in moments if it["event"] == "executions.stuck"] == []
    assert [it for it in failed if not it["error"].startswith(AWAY)] == []


AWAY: Final = ("OperationalError", "AdminShutdown", "CannotConnectNow", "PoolTimeout", "CrashShutdown")
