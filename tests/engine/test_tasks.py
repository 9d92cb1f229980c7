"""Tasks from the flow that asks to the worker that does: on a real database, with the worker in this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel

from contracts.codec import Codec, Sealing
from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.objects import ObjectMissing, Reference
from orchestrator import (
    Command,
    Context,
    Effect,
    Refused,
    Retry,
    StepError,
    Tasks,
    UsageError,
    attempt,
    local,
    seconds,
    workflow,
)
from orchestrator import task_worker as task_worker_module
from orchestrator.client import Client, ExecutionView
from orchestrator.flows import Flows
from orchestrator.objects.files import FileStore
from orchestrator.objects.kept import Kept
from orchestrator.objects.large import Large
from orchestrator.store import tasks as store
from orchestrator.store.database import Connection, Pool
from orchestrator.store.hints import Hints
from orchestrator.store.situation import situation
from orchestrator.task_worker import TaskLimits, TaskWorker, task_worker
from orchestrator.telemetry.tree import traced
from orchestrator.why import explain
from tests.engine.conftest import Working
from tests.invariants import broken
from tests.moments import Moments
from tests.waiting import until

LIMITS = TaskLimits(
    concurrency=4,
    lease=timedelta(seconds=2),
    poll=timedelta(milliseconds=50),
    drain=timedelta(milliseconds=200),
)
QUICK = Retry.fixed(timedelta(milliseconds=20), attempts=3, jitter=0)

RAN: list[Any] = []
GO_ON: list[asyncio.Event] = []
HOLD: list[threading.Event] = []


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    RAN.clear()
    GO_ON[:] = [asyncio.Event()]
    HOLD[:] = [threading.Event()]
    yield
    HOLD[0].set()


class Resized(BaseModel):
    width: int


class Resize(Command[Resized], type="image.resize"):
    image: str
    width: int = 100


class Once(Command[None], type="paper.print", effect=Effect.AT_MOST_ONCE):
    image: str


TASKS = Tasks()


@TASKS.does(Resize)
async def resize(command: Resize) -> Resized:
    it = attempt()
    RAN.append((command.image, it.number, it.key))
    match command.image:
        case "broken":
            raise ValueError("no image")
        case "refused":
            raise Refused("no-such-image", "look again", detail={"seen": 0})
        case "twice" if it.number == 1:
            raise OSError("disk")
        case "waits":
            await GO_ON[0].wait()
        case "beats":
            it.heartbeat({"page": 7})
            await GO_ON[0].wait()
        case "odd":
            return {"width": "wide"}  # pyright: ignore[reportReturnType]  # what it should not
        case _:
            pass
    return Resized(width=command.width)


@TASKS.does(Once)
def prints(command: Once) -> None:
    RAN.append(command.image)
    if command.image == "waits":
        HOLD[0].wait(10)
    if command.image == "listens":
        while True:
            attempt().heartbeat()
            HOLD[0].wait(0.01)


def drops(image: str) -> None:
    RAN.append(f"drops {image}")


@workflow(name="resizes", version="1")
async def resizes(ctx: Context, image: str) -> str:
    try:
        done = await ctx.task(Resize(image=image), queue="media", retry=QUICK)
    except StepError as error:
        return f"{type(error).__name__} {error.code}: {error.detail}"
    return f"width {done.width}"


@workflow(name="prints", version="1")
async def prints_once(ctx: Context, image: str) -> str:
    try:
        await ctx.task(Once(image=image), queue="paper", unknown="raise")
    except StepError as error:
        return f"{type(error).__name__} {error.code}"
    return "printed"


@workflow(name="undoes", version="1")
async def undoes(ctx: Context, image: str) -> None:
    await ctx.task(Resize(image=image), queue="media", undo=local(drops, image))
    await ctx.sleep(seconds(3600))


@workflow(name="races", version="1")
async def races(ctx: Context, image: str) -> str:
    done = await ctx.first(
        ctx.task(Resize(image=image, width=1), queue="fast"),
        ctx.task(Resize(image=image, width=2), queue="never"),
    )
    return f"width {done.width}"


@workflow(name="hurries", version="1")
async def hurries(ctx: Context, image: str) -> str:
    try:
        await ctx.task(
            Resize(image=image), queue="media", timeout=timedelta(milliseconds=100), undo=local(drops, image)
        )
    except StepError as error:
        raise RuntimeError(error.code) from None
    return "done"


FLOWS = Flows([resizes, prints_once, undoes, races, hurries])
Serving = Callable[..., AbstractAsyncContextManager[Moments]]
Running = Callable[[str, str], Awaitable[ExecutionView]]


@pytest.fixture
def serving(pool: Pool, hints: Hints) -> Serving:
    """`async with serving() as moments:` a worker of all queues but `never` runs while inside."""

    @asynccontextmanager
    async def one(
        *, limits: TaskLimits = LIMITS, tasks: Tasks = TASKS, **more: Any
    ) -> AsyncGenerator[Moments]:
        moments, stop = Moments(), asyncio.Event()
        queues = ["media", "paper", "fast"]
        worker = TaskWorker(
            pool, tasks, queues=queues, hints=hints, observer=moments, limits=limits, owner="w1", **more
        )
        job = asyncio.create_task(worker.run(stop))
        try:
            yield moments
        finally:
            stop.set()
            await job
        assert not [fields for name, fields in moments.all if name == "task worker failed"]

    return one


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn) == []


@pytest.fixture
def running(working: Working, serving: Serving, client: Client) -> Running:
    """`await running(flow, image)`: how an execution ends that a worker of flows and one of queues take on."""

    async def run(flow: str, image: str) -> ExecutionView:
        async with working(flows=FLOWS), serving():
            started = await client.start(FLOWS.get(flow), image)
            return await client.wait(started.execution_id, seconds=30)

    return run


@pytest.mark.parametrize("sealed", [True, pytest.param(False, marks=pytest.mark.proof)])
async def test_a_large_task_is_read_from_the_payload_store_and_fails_while_that_does_not_have_it(
    running: Running, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sealed: bool
) -> None:
    image = "i" * (PAYLOAD_BYTES_MAX + 1)
    monkeypatch.setattr(Large, "kept", Kept(FileStore(tmp_path / "objects")))
    monkeypatch.setattr(Sealing, "codec", Codec([("one", bytes(32))], os.urandom) if sealed else None)
    done = await running("resizes", image)
    ran = [one[0] for one in RAN]
    lost = [ObjectMissing("0" * 64, "file:///somewhere")]

    class Loses:
        """The store as workers of queues see it: it has lost an object once."""

        @staticmethod
        async def get(tenant: int, one: Reference) -> bytes:
            if lost:
                raise lost.pop()
            return await Large.get(tenant, one)

    monkeypatch.setattr(task_worker_module, "Large", Loses)
    again = await running("resizes", image + "!")

    rows = await conn.execute(
        "select max(length(payload::text)), array_agg(state order by number) from waypost.task"
    )
    assert (done.output, again.output) == ("width 100", "width 100")
    assert ran == [image]
    assert await rows.fetchone() == (pytest.approx(75, abs=75), ["done", "failed", "done"])


async def state(conn: Connection, execution: UUID) -> list[str]:
    return [one.state for one in await store.of_execution(conn, str(execution), tenant=1)]


async def in_state(conn: Connection, execution: UUID, *states: str) -> None:
    async def found() -> bool:
        return await state(conn, execution) == list(states)

    await until(found, what=f"tasks {states}")


# ---- what becomes of a task ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgetful", [False, True], ids=["", "forgetful"])
async def test_a_task_is_done_by_a_worker_of_its_queue_and_its_reply_returned(
    working: Working, serving: Serving, client: Client, *, forgetful: bool
) -> None:
    async with working(flows=FLOWS, forgetful=forgetful), serving() as moments:
        started = await client.start(FLOWS.get("resizes"), "a")
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", "width 100")
    assert [("a", 1, f"{started.execution_id}/0/resize")] == RAN
    [told] = [fields for name, fields in moments.all if name == "task.tried"]
    assert (told["queue"], told["type"], told["outcome"]) == ("media", "image.resize", "done")


@pytest.mark.parametrize(
    ("image", "output", "tries"),
    [
        ("broken", "StepFailed raised: ValueError: no image", 3),
        ("refused", "StepRefused no-such-image: look again", 1),
        ("twice", "width 100", 2),
        ("odd", "StepFailed reply-invalid: what it returned is no reply of image.resize: at /width:", 1),
    ],
)
async def test_what_a_function_raises_or_returns_is_what_becomes_of_its_task(
    image: str, output: str, tries: int, running: Running
) -> None:
    view = await running("resizes", image)

    assert view.output.startswith(output)
    assert [number for _, number, _ in RAN] == list(range(1, tries + 1))
    assert len({key for *_, key in RAN}) == 1


async def test_a_plain_function_runs_in_a_thread(running: Running) -> None:
    view = await running("prints", "a")

    assert (view.output, RAN) == ("printed", ["a"])


async def test_a_task_that_nobody_here_can_do_is_left_to_its_next_try(
    working: Working, serving: Serving, client: Client
) -> None:
    async with working(flows=FLOWS), serving(tasks=Tasks()):
        started = await client.start(FLOWS.get("resizes"), "a")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "StepFailed no-handler: w1 has no function for image.resize"


async def test_a_command_that_its_class_does_not_take_is_refused(
    working: Working, serving: Serving, client: Client
) -> None:
    class Narrow(Command[Resized], type="image.resize"):
        image: str

    narrow = Tasks()
    narrow.does(Narrow)(lambda _: Resized(width=1))
    async with working(flows=FLOWS), serving(tasks=narrow):
        started = await client.start(FLOWS.get("resizes"), "a")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output.startswith("StepRefused input-invalid: at /width")


# ---- taken back ------------------------------------------------------------------------------------------------


async def test_the_loser_of_a_race_that_nobody_began_never_runs(running: Running, conn: Connection) -> None:
    view = await running("races", "a")

    assert (view.output, len(RAN)) == ("width 1", 1)
    assert await state(conn, UUID(view.row.execution_id)) == ["done", "withdrawn"]


async def test_a_task_that_runs_when_its_flow_is_cancelled_is_stopped_and_then_undone(
    working: Working, serving: Serving, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS), serving():
        started = await client.start(FLOWS.get("undoes"), "waits")
        await in_state(conn, started.execution_id, "running")
        await client.cancel(started.execution_id, by="ann", reason="enough")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "cancelled"
    assert await state(conn, started.execution_id) == ["lost"]
    assert RAN[-1] == "drops waits"
    kinds = [f"{fact.kind} {fact.path}" for fact in view.facts if fact.path.startswith("resize")]
    assert kinds == [
        "asked resize", "withdrawn resize", "late resize", "asked resize/undo", "ended resize/undo",
    ]  # fmt: skip


async def test_a_task_whose_time_was_over_before_anybody_took_it_never_runs_and_is_not_undone(
    working: Working, client: Client, conn: Connection, serving: Serving
) -> None:
    async with working(flows=FLOWS):
        started = await client.start(FLOWS.get("hurries"), "a")
        view = await client.wait(started.execution_id, seconds=30)
        async with serving():
            pass

    assert (view.row.status, view.error and view.error["detail"]) == ("failed", "RuntimeError: timeout")
    assert (RAN, await state(conn, started.execution_id)) == ([], ["withdrawn"])


async def test_a_thread_learns_from_its_heartbeat_that_nobody_waits_for_it(
    working: Working, serving: Serving, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS), serving():
        started = await client.start(FLOWS.get("prints"), "listens")
        await in_state(conn, started.execution_id, "running")
        await client.cancel(started.execution_id, by="ann", reason="enough")
        await client.wait(started.execution_id, seconds=30)
        await in_state(conn, started.execution_id, "lost")


# ---- workers that go -------------------------------------------------------------------------------------------


async def test_a_worker_that_stops_lets_its_tasks_end_and_takes_no_more(
    working: Working, serving: Serving, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        async with serving(limits=TaskLimits(poll=LIMITS.poll, drain=timedelta(seconds=20))) as moments:
            started = await client.start(FLOWS.get("resizes"), "waits")
            await in_state(conn, started.execution_id, "running")
            asyncio.get_running_loop().call_later(0.2, GO_ON[0].set)
        assert moments.count("task worker stopped") == 1
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "width 100"


async def test_what_a_worker_stops_half_way_is_tried_again_by_another(
    working: Working, serving: Serving, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        async with serving():
            started = await client.start(FLOWS.get("resizes"), "waits")
            await in_state(conn, started.execution_id, "running")
        GO_ON[0].set()
        async with serving():
            view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "width 100"
    assert [number for _, number, _ in RAN] == [1, 2]
    assert await state(conn, started.execution_id) == ["lost", "done"]


async def test_a_task_of_a_worker_that_is_silent_is_done_by_another_and_the_first_one_s_report_is_late(
    working: Working, serving: Serving, client: Client, conn: Connection, pool: Pool
) -> None:
    async with working(flows=FLOWS):
        started = await client.start(FLOWS.get("resizes"), "a")
        await in_state(conn, started.execution_id, "due")
        [silent] = await store.claim(
            conn, queues=["media"], limit=1, owner="dead", token=started.execution_id, lease=timedelta(0)
        )
        async with serving():
            view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "width 100"
    assert [number for _, number, _ in RAN] == [2]
    late = store.Report(silent, "done", '{"outcome": "done", "value": {"width": 1}}')
    assert await store.settle(conn, [late]) == {silent.task_id: ("late", "lost")}


async def test_an_at_most_once_task_of_a_silent_worker_is_unknown(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        started = await client.start(FLOWS.get("prints"), "a")
        await in_state(conn, started.execution_id, "due")
        await store.claim(
            conn, queues=["paper"], limit=1, owner="dead", token=started.execution_id, lease=timedelta(0)
        )
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "OutcomeUnknown worker-lost"


GONE = psycopg.OperationalError("the server closed the connection unexpectedly")


@pytest.mark.parametrize("name", ["claim", "settle", "beat"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_of_a_worker_that_fails_or_whose_answer_is_lost_changes_nothing(
    name: str, when: str, monkeypatch: pytest.MonkeyPatch, running: Running, conn: Connection
) -> None:
    real, failed = getattr(store, name), list[str]()

    async def fails_once(*args: Any, **more: Any) -> Any:
        found = await real(*args, **more) if failed or when == "after" else None
        if not failed and (name != "claim" or when == "before" or found):
            failed.append(name)
            raise GONE
        return found

    monkeypatch.setattr(store, name, fails_once)
    asyncio.get_running_loop().call_later(1.5, GO_ON[0].set)  # for the beats
    view = await running("resizes", "waits" if name == "beat" else "a")

    assert (view.output, failed, len(RAN)) == ("width 100", [name], 1)
    assert await state(conn, UUID(view.row.execution_id)) == ["done"]


async def test_a_worker_that_dies_after_its_claim_has_done_nothing_and_its_task_is_tried_again(
    working: Working, serving: Serving, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        started = await client.start(FLOWS.get("undoes"), "a")
        await in_state(conn, started.execution_id, "due")
        await store.claim(
            conn, queues=["media"], limit=1, owner="dead", token=started.execution_id, lease=timedelta(0)
        )
        async with serving():

            async def is_done() -> bool:
                return await state(conn, started.execution_id) == ["lost", "done"]

            await until(is_done, what="the second try")
        await client.cancel(started.execution_id, by="ann", reason="enough")
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, RAN[-1]) == ("cancelled", "drops a")


async def test_two_workers_share_a_queue_and_do_each_task_once(
    working: Working, serving: Serving, client: Client
) -> None:
    async with working(flows=FLOWS), serving(), serving():
        started = [await client.start(FLOWS.get("resizes"), f"i{n}") for n in range(20)]
        views = [await client.wait(one.execution_id, seconds=30) for one in started]

    assert {view.output for view in views} == {"width 100"}
    assert sorted(image for image, *_ in RAN) == sorted(f"i{n}" for n in range(20))


async def test_a_worker_runs_inside_of_any_program(working: Working, client: Client, dsn: str) -> None:
    async with working(flows=FLOWS), task_worker(dsn, TASKS, queues=["media"], limits=LIMITS):
        started = await client.start(FLOWS.get("resizes"), "a")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "width 100"


# ---- what people see -------------------------------------------------------------------------------------------


async def test_a_task_is_explained_while_it_waits_while_it_runs_and_when_its_worker_is_silent(
    working: Working, serving: Serving, client: Client, conn: Connection
) -> None:
    async def why(execution: UUID) -> tuple[str, str, str | None, int | None]:
        it = await situation(conn, str(execution), tenant=1)
        assert it is not None
        told = explain(it, it.around.now)
        return told.code, told.sentence, told.holder, told.attempt

    async with working(flows=FLOWS):
        started = await client.start(FLOWS.get("resizes"), "beats")
        await in_state(conn, started.execution_id, "due")
        code, sentence, holder, number = await why(started.execution_id)
        assert (code, holder, number) == ("task-queued", "media", 1)
        assert "for a worker of queue media, try 1" in sentence
        async with serving():

            async def has_spoken() -> bool:
                return "page" in (await why(started.execution_id))[1]

            await until(has_spoken, what="progress")
            code, sentence, holder, _ = await why(started.execution_id)
            assert (code, holder) == ("task-running", "w1")
            assert 'last said {"page": 7}; the lease lasts until' in sentence
            GO_ON[0].set()
            await client.wait(started.execution_id, seconds=30)


async def test_tries_of_a_task_are_in_the_trace_of_its_execution(running: Running, conn: Connection) -> None:
    view = await running("resizes", "twice")
    it = await situation(conn, view.row.execution_id, tenant=1)
    assert it is not None

    spans = traced(it, [], [], gap=None).spans
    made = {span.at.span_id for span in spans if span.name == "create media"}
    tries = [span for span in spans if span.name == "process image.resize"]
    assert [(one.error, one.attributes["waypost.attempt.number"]) for one in tries] == [
        ("failed", 1),
        (None, 2),
    ]
    assert {one.parent for one in tries} == made
    assert len({span.at.trace_id for span in spans}) == 1


# ---- registering -----------------------------------------------------------------------------------------------


def test_a_type_has_one_function_and_a_class_has_a_type() -> None:
    tasks = Tasks()
    tasks.does(Resize)(lambda _: Resized(width=1))

    with pytest.raises(UsageError, match=r"image\.resize is done by"):
        tasks.does(Resize)
    with pytest.raises(UsageError, match="expected a class with type="):
        tasks.does(Command)
    with pytest.raises(UsageError, match="two functions do it"):
        tasks.add(TASKS)


def test_a_worker_has_queues(pool: Pool, hints: Hints) -> None:
    with pytest.raises(UsageError, match="at least one"):
        TaskWorker(pool, TASKS, queues=[], hints=hints)
    with pytest.raises(UsageError, match="queue ''"):
        TaskWorker(pool, TASKS, queues=[""], hints=hints)
