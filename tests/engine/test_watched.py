"""One try of a local step that is watched: its own time, its silence, what it leaves, and what its probe knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from contracts import Refused
from contracts import probe as findings
from orchestrator.core.ask import Ask, Watch
from orchestrator.core.errors import UsageError
from orchestrator.engine import attempt as attempt_module
from orchestrator.engine.attempt import (
    Done,
    Failure,
    Lost,
    Refusal,
    Result,
    Stopped,
    Watchman,
    run,
)
from orchestrator.engine.pulse import Attempt, Pulse, attempt
from orchestrator.testing import NOON

Json = Any


class Money(BaseModel):
    amount: Decimal
    at: datetime


class Threads(ThreadPoolExecutor):
    """One thread; `given` is set when it has got something to do."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given = asyncio.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.given.set()
        return future


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads() as pool:
        yield pool


# ---- its own time, and its silence -----------------------------------------------------------------------------

NEVER = timedelta(days=1)
AT_ONCE = timedelta(milliseconds=1)


async def watched(
    fn: Callable[..., Any],
    *args: Any,
    threads: Threads,
    number: int = 1,
    timeout: timedelta | None = None,  # noqa: ASYNC109  # of the step, not of this call
    heartbeat: timedelta | None = None,
    probe: Callable[..., Any] | None = None,
    left: Json = None,
) -> Result:
    ask = Ask("step", "work", {"do": "step"}, work=(fn, args))
    ask.attempt, ask.due = number, NOON + timedelta(hours=1)
    if not (timeout is heartbeat is probe is left is None):
        ask.watch = Watch(timeout, heartbeat, probe, left)
    return await run(ask, key="key", threads=threads, now=NOON)


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        ({"timeout": AT_ONCE}, "attempt-timeout"),
        ({"heartbeat": AT_ONCE}, "heartbeat-lost"),
        ({"timeout": AT_ONCE, "heartbeat": NEVER}, "attempt-timeout"),
        ({"timeout": NEVER, "heartbeat": AT_ONCE}, "heartbeat-lost"),
    ],
    ids=["its-time", "its-silence", "its-time-first", "its-silence-first"],
)
async def test_a_coroutine_whose_time_is_over_or_that_is_silent_is_ended(
    threads: Threads, bounds: dict[str, Any], code: str
) -> None:
    ended: list[str] = []

    async def waits() -> None:
        attempt().pulse.left = "half"
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    result = await watched(waits, threads=threads, **bounds)

    assert isinstance(result, Lost)
    assert (result.error["code"], result.left, result.rest, ended) == (code, "half", None, ["cleaned up"])


def test_every_word_gives_a_silent_try_its_whole_time_again_and_its_own_time_goes_on() -> None:
    async def times() -> list[float]:
        pulse = Pulse()
        pulse.beat_at = 100.0
        watchman = Watchman(Watch(timedelta(seconds=30), timedelta(seconds=10)), pulse)
        found = [watchman.time_left(104.0)]
        pulse.beat_at = 108.0
        found.append(watchman.time_left(112.0))
        pulse.beat_at = 125.0
        return [*found, watchman.time_left(126.0), watchman.time_left(131.0)]

    assert asyncio.run(times()) == [6, 6, 4, -1]


async def test_a_try_that_ends_in_its_last_moment_has_ended_as_it_says(threads: Threads) -> None:
    async def insists() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done all the same"
        return "never"

    async def declines() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise Refused("not-done")

    assert await watched(insists, threads=threads, timeout=AT_ONCE) == Done("done all the same")
    assert await watched(declines, threads=threads, timeout=AT_ONCE) == Refusal(
        {"code": "not-done", "detail": ""}
    )


async def test_a_thread_hears_from_its_heartbeat_that_nobody_waits_for_it_any_more(
    threads: Threads,
) -> None:
    def beats() -> None:
        while True:
            attempt().heartbeat({"page": 3})

    result = await watched(beats, threads=threads, timeout=AT_ONCE)

    assert isinstance(result, Lost)
    assert (result.error["code"], result.left, result.rest) == ("attempt-timeout", {"page": 3}, None)


async def test_a_thread_that_does_not_end_is_waited_for_elsewhere(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "STOP_SECONDS", 0.0)
    go_on = threading.Event()

    def blocks() -> str:
        assert go_on.wait(60)
        return "over" if attempt().is_over else "wanted"

    result = await watched(blocks, threads=threads, heartbeat=AT_ONCE)
    assert isinstance(result, Lost) and result.rest is not None and not result.rest.done()
    go_on.set()

    assert await result.rest == Done("over")


async def test_a_watched_try_that_is_given_up_is_stopped(threads: Threads) -> None:
    begun = asyncio.Event()
    knew: list[bool] = []

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            knew.append(attempt().is_over)

    task = asyncio.create_task(watched(waits, threads=threads, heartbeat=NEVER))
    await begun.wait()
    task.cancel()

    assert (await task, knew) == (Stopped(), [True])


@pytest.mark.parametrize(
    ("number", "result"),
    [
        (1, Refusal({"code": "never-begun", "detail": "its step was over before a thread was free"})),
        (2, Stopped()),
    ],
    ids=["the-first", "a-later-one"],
)
@pytest.mark.parametrize("timeout", [None, NEVER], ids=["plain", "timed"])
async def test_a_try_that_is_given_up_before_it_had_a_thread_never_runs(
    threads: Threads,
    number: int,
    result: Result,
    timeout: timedelta | None,  # noqa: ASYNC109  # of the step
) -> None:
    go_on, ran = threading.Event(), threading.Event()
    blocker = threads.submit(go_on.wait, 60)
    threads.given.clear()
    task = asyncio.create_task(watched(ran.set, threads=threads, number=number, timeout=timeout))
    await threads.given.wait()
    task.cancel()

    found = await task
    go_on.set()
    blocker.result()

    assert (found, ran.is_set()) == (result, False)


async def test_a_try_knows_what_the_one_before_left_and_when_its_own_time_is_over(
    threads: Threads,
) -> None:
    told: list[Attempt] = []

    async def looks() -> None:
        told.append(attempt())

    await watched(looks, threads=threads, number=2, timeout=timedelta(minutes=5), left={"page": 3})
    await watched(looks, threads=threads, number=2, timeout=timedelta(hours=5))

    assert told == [
        Attempt("key", 2, NOON + timedelta(minutes=5), {"page": 3}),
        Attempt("key", 2, NOON + timedelta(hours=1)),
    ]


async def test_what_a_try_left_stays_until_a_later_one_leaves_something_else(
    threads: Threads,
) -> None:
    async def breaks(left: Json) -> None:
        attempt().heartbeat(left)
        raise ConnectionError

    results = [
        await watched(breaks, left, threads=threads, heartbeat=NEVER, left="before") for left in (None, "now")
    ]

    assert [isinstance(result, Failure) and result.left for result in results] == ["before", "now"]


@pytest.mark.parametrize(
    ("left", "why"),
    [("x" * 5000, "4096"), (float("nan"), "nan"), (object(), "object")],
    ids=["large", "nan", "any"],
)
async def test_a_heartbeat_leaves_nothing_that_no_journal_can_keep(
    threads: Threads, left: Json, why: str
) -> None:
    async def leaves() -> str:
        with pytest.raises(UsageError) as refused:
            attempt().heartbeat(left)
        return str(refused.value)

    result = await watched(leaves, threads=threads, heartbeat=NEVER)

    assert isinstance(result, Done) and why in result.value


# ---- its probe -------------------------------------------------------------------------------------------------


class Probe:
    """Answers what it is told to, and counts how often it and the step were called."""

    def __init__(self, finding: Any) -> None:
        self.finding = finding
        self.calls: list[str] = []

    async def look(self, n: int) -> Any:
        self.calls.append(f"probe {n}")
        if isinstance(self.finding, BaseException):
            raise self.finding
        return self.finding

    def step(self, n: int) -> Money:
        self.calls.append(f"step {n}")
        return Money(amount=Decimal(n), at=NOON)


MONEY = {"at": "2027-01-15T12:00:00Z", "amount": "9"}


@pytest.mark.parametrize(
    ("number", "finding", "calls", "expected"),
    [
        (1, findings.CannotSay(), ["step 9"], Done(MONEY)),
        (2, findings.NotDone(), ["probe 9", "step 9"], Done(MONEY)),
        (2, findings.Done(Money(amount=Decimal(9), at=NOON)), ["probe 9"], Done(MONEY)),
        (2, findings.CannotSay(), ["probe 9"], "probe-unclear"),
        (2, ConnectionError("away"), ["probe 9"], "probe-failed"),
        (2, Refused("no"), ["probe 9"], "probe-failed"),
        (2, True, ["probe 9"], "probe-failed"),
    ],
    ids=["first-try", "not-done", "done", "cannot-say", "raises", "refuses", "says-something-else"],
)
async def test_a_probe_is_asked_before_a_step_is_run_again(
    threads: Threads, number: int, finding: Any, calls: list[str], expected: Any
) -> None:
    subject = Probe(finding)

    result = await watched(subject.step, 9, threads=threads, number=number, probe=subject.look)

    assert subject.calls == calls
    if isinstance(result, Failure):
        assert (result.error["code"], result.unknown) == (expected, True)
    else:
        assert result == expected


async def test_a_probe_has_the_time_of_its_try(threads: Threads) -> None:
    async def waits(n: int) -> None:
        await asyncio.Event().wait()

    result = await watched(str, 9, threads=threads, number=2, probe=waits, timeout=AT_ONCE)

    assert isinstance(result, Lost) and result.error["code"] == "attempt-timeout"
