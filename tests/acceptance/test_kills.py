"""Processes die at the worst moments, and nothing is lost by it or done twice."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psycopg
import pytest

from migrations import runner
from orchestrator.embedded import EmbeddedPostgres
from orchestrator.embedded.server import Postmaster
from tests.acceptance.stand import BOUGHT, Role, Stand, facts, free_port, stand
from tests.cluster import fast_folder
from tests.waiting import until, until_true


async def test_when_a_worker_dies_another_continues_and_completed_steps_do_not_run_again(
    dsn: str, tmp_path: Path
) -> None:
    async with stand(dsn, tmp_path, roles=("receiver", "relay", "worker")) as it:
        await it.order("order-1", flow="packed")
        steps = tmp_path / "order-1.steps"
        until_true(lambda: begun(steps) == ["weigh", "pack"], what="the packing")
        await it.part("worker").kill()
        it.open_gate()
        await it.part("worker").start()
        [view] = await it.ended("order-1")

        assert await it.at_rest() == []
    assert (view.row.status, begun(steps)) == ("completed", ["weigh", "pack", "pack"])
    assert facts(view, "orphaned", "ended") == [
        "ended reserve", "ended weigh", "orphaned ", "ended pack", "ended create",
    ]  # fmt: skip
    assert it.book().effects_of("order-1") == ["done stock.reserve", "done shipment.create"]


def begun(steps: Path) -> list[str]:
    """The local steps that were begun, each time that they were."""
    return steps.read_text(encoding="ascii").split() if steps.exists() else []


@pytest.mark.proof
async def test_a_result_that_was_not_stored_when_its_worker_died_is_made_again(
    dsn: str, tmp_path: Path
) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("order-1", flow="packed")
        steps = tmp_path / "order-1.steps"
        until_true(lambda: begun(steps) == ["weigh", "pack"], what="the packing")
        async with killed_at_its_commit(it, dsn, "order-1", role="worker"):
            it.open_gate()
        [view] = await it.ended("order-1")

        assert await it.at_rest() == []
    assert (view.row.status, begun(steps)) == ("completed", ["weigh", "pack", "pack"])
    assert facts(view, "orphaned", "ended")[2:4] == ["orphaned ", "ended pack"]


@pytest.mark.proof
async def test_a_reply_that_was_not_stored_when_the_receiver_died_was_not_acknowledged(
    dsn: str, tmp_path: Path
) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("gated-1")
        await until(lambda: shipments(it, 1), what="a shipment that nobody has replied to")
        async with killed_at_its_commit(it, dsn, "gated-1", role="receiver"):
            it.open_gate()
        [view] = await it.ended("gated-1")

        assert await it.at_rest() == []
    [shipment] = it.book().arrivals_of("gated-1", "shipment.create")
    posts = [post for post in it.book().posts if post.causation == shipment.id]
    assert view.row.status == "completed"
    assert (posts[0].sent, posts[0].status) == (True, None)
    assert [post.status for post in posts if post.status is not None] == [202]
    assert {post.inbox for post in posts} == {""}


BLOCKED: Final = """
    select pid
      from pg_stat_activity
     where application_name = %s
       and %s = any(pg_blocking_pids(pid))
"""


@asynccontextmanager
async def killed_at_its_commit(it: Stand, dsn: str, order: str, *, role: Role) -> AsyncGenerator[None]:
    """What happens inside makes the one part of that role write to an order's execution. It comes as far as the
    row's lock; there it dies, and its transaction with it. Then it is started anew.
    """
    async with await psycopg.AsyncConnection.connect(dsn) as locker:
        await locker.execute(
            "select 1 from waypost.execution where execution_id = %s for update", (it.started[order],)
        )
        yield
        blocked = f"waypost-{role}", locker.info.backend_pid

        async def waits() -> bool:
            return await it.one(BLOCKED, *blocked) is not None

        await until(waits, what=f"the {role} to wait for the row of {order}")
        await it.part(role).kill()
        await it.one("select pg_terminate_backend(pid, 10000) from (" + BLOCKED + ") b", *blocked)
    await it.part(role).start()


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of this test's own, at a port that it keeps when it is started again."""
    folder = fast_folder()
    server = EmbeddedPostgres.temporary(within=folder)
    server = EmbeddedPostgres(server.data_dir, port=free_port())
    with psycopg.connect(server.start(), autocommit=True) as conn:
        runner.migrate(conn)
    yield server
    server.remove()


async def test_everything_goes_on_when_all_processes_and_postgresql_were_killed(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    orders = [f"gated-{n}" for n in range(5)] + [f"declined-{n}" for n in range(3)]
    flows = {"order-1": "packed", "order-2": "approved", "abreast-3": "abreast", "order-4": "rested"}
    async with stand(server.dsn(), tmp_path) as it:
        for order in orders:
            await it.order(order)
        await until(lambda: shipments(it, 5), what="shipments that nobody has replied to")
        for order, flow in flows.items():
            await it.order(order, flow=flow)
        until_true(lambda: "pack" in begun(tmp_path / "order-1.steps"), what="the packing")
        until_true(lambda: len(it.book().effects_of("abreast-3")) == 2, what="two steps at once")
        await until(lambda: counts(it, WAITING, 1), what="an order that waits for an event")
        await until(lambda: counts(it, ASLEEP, 1), what="an order that sleeps")
        crash(server)
        await it.kill_all()
        server.start()
        it.open_gate()
        await it.start_all()
        await it.connect(server.dsn())
        approval = {"order": "order-2", "by": "ann"}
        assert await it.outsider.post("approval", "order.approved", "order-2", approval) == (202, "")
        views = await it.ended(*orders, *flows)

        assert await it.at_rest() == []
    ends = {view.row.business_key: view.row.status for view in views}
    assert ends == {
        order: "compensated" if order.startswith("declined") else "completed" for order in [*orders, *flows]
    }
    for order in orders[:5]:
        assert it.book().effects_of(order) == [*BOUGHT, "done shipment.create"]
    for order in ("order-2", "order-4"):
        assert it.book().effects_of(order) == [BOUGHT[0], "done shipment.create"]
    assert sorted(it.book().effects_of("abreast-3")[:2]) == sorted(BOUGHT)
    assert it.book().effects_of("abreast-3")[2:] == ["done shipment.create"]


SHIPPING: Final = "select count(*) from waypost.outbox where path = 'create' and state = 'delivered'"


WAITING: Final = "select count(*) from waypost.wait where inbox_id is null"
ASLEEP: Final = """
    select count(*)
      from waypost.execution e
      join waypost.journal j using (tenant_id, execution_id, position)
     where j.kind = 'asked'
       and j.payload ->> 'kind' = 'timer'
       and e.owner is null
"""


async def shipments(it: Stand, number: int) -> bool:
    """Whether so many shipments have been taken by the service."""
    return await counts(it, SHIPPING, number)


async def counts(it: Stand, query: str, number: int) -> bool:
    return await it.one(query) == number


def crash(server: EmbeddedPostgres) -> None:
    """SIGQUIT: it leaves at once, and has to recover when it is started again."""
    running = Postmaster.over(server.cluster)
    assert running is not None
    os.kill(running.pid, signal.SIGQUIT)
    server.stop()
