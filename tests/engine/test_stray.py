"""Whatever the code of users raises ends what raised it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import Context, Retry, local, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from tests.engine.conftest import Working


class Weird(BaseException): ...


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def thread(error: BaseException) -> Callable[[], int]:
    def raises() -> int:
        raise error

    return raises


def loop(error: BaseException) -> Callable[[], Any]:
    async def raises() -> int:
        raise error

    return raises


STEPS = [
    *(
        thread(e)
        for e in (
            Weird(),
            GeneratorExit(),
            StopIteration(),
            Mute(),
            asyncio.CancelledError(),
            KeyboardInterrupt(),
        )
    ),
    *(loop(e) for e in (Weird(), GeneratorExit(), Mute(), KeyboardInterrupt())),
]


@pytest.mark.parametrize("n", range(len(STEPS)))
async def test_whatever_a_step_raises_is_its_outcome(working: Working, client: Client, n: int) -> None:
    @workflow(name="stray", version="1")
    async def stray(ctx: Context, _: int) -> str:
        try:
            await ctx.step(STEPS[n], retry=Retry(attempts=1))
        except Exception as error:  # noqa: BLE001
            return type(error).__name__
        return "none"

    started = await client.start(stray, 1)
    async with working(flows=Flows([stray])):
        view = await client.wait(started.execution_id, seconds=30)
    assert view.output in ("StepFailed", "OutcomeUnknown")


def fine(n: int) -> int:
    return n


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), Weird(), asyncio.CancelledError()], ids=repr
)
@pytest.mark.parametrize("late", [False, True])
async def test_whatever_an_undo_function_raises_holds_only_its_execution(
    working: Working, client: Client, error: BaseException, late: bool
) -> None:
    def undo(value: int | None) -> Any:
        if late and value is None:
            return local(fine, 1)
        raise error

    @workflow(name="undoes", version="1")
    async def undoes(ctx: Context, n: int) -> int:
        return await ctx.step(fine, n, undo=undo)

    started = await client.start(undoes, 1)
    async with working(flows=Flows([undoes])):
        view = await client.wait(started.execution_id, seconds=30)
    assert view.held is not None and view.held.code == "program-fault"
