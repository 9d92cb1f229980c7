"""The life of an execution: each move that a commit may make, and each that it may not."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, Final

import pytest

from orchestrator import Context, command, workflow
from orchestrator.core import waiting
from orchestrator.core.errors import Halt
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.status import TERMINAL, TRANSITIONS, Status
from orchestrator.engine.clock import Clock
from orchestrator.engine.inputs import Inputs
from orchestrator.engine.message import Wire
from orchestrator.engine.turn import turn_of
from orchestrator.store.executions import Claim
from orchestrator.testing import NOON
from orchestrator.workflow import Workflow
from tests.core.answers import UNDO, cancelled, done, refused, unknown

ALIVE = ("open", "paused", "held")
OVER = ("completed", "compensated", "failed", "cancelled")
ALLOWED = {(before, after) for before in ALIVE for after in (*ALIVE, *OVER)}
NOT_YET: Final = {pair for pair in ALLOWED if "paused" in pair}
"""Moves that the table allows and nothing makes yet: there is no order to pause."""


def test_the_names_are_those_that_the_table_of_executions_allows() -> None:
    assert [str(status) for status in Status] == [*ALIVE, *OVER]


@pytest.mark.parametrize(("before", "after"), list(product([*ALIVE, *OVER], [*ALIVE, *OVER])))
def test_a_move_is_allowed_while_alive_and_none_leads_out_of_an_end(before: str, after: str) -> None:
    allowed = Status(after) in TRANSITIONS[Status(before)]

    assert allowed == ((before, after) in ALLOWED)


def test_terminal_are_those_from_which_nothing_leads() -> None:
    assert {status for status, after in TRANSITIONS.items() if not after} == TERMINAL
    assert {str(status) for status in TERMINAL} == set(OVER)


# ---- every move is made ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Life:
    """An execution of `flow`, committed after each thing that happens to it as the engine commits it."""

    flow: Workflow[int, Any]
    statuses: list[str] = field(default_factory=lambda: ["open"])
    journal: list[Fact] = field(default_factory=list[Fact])
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.machine = Machine(self.flow.program)
        self.has(lambda machine: machine.tell("started", "", {"input": 1, "seed": ""}, NOON))

    def has(self, *happenings: Callable[[Machine], object]) -> Life:
        for happening in happenings:
            try:
                happening(self.machine)
            except Halt as halt:
                self.machine.remark("held", "", {"code": halt.code, "reason": str(halt)}, NOON)
                self.commit(Status.HELD)
                self.machine.evict()
            else:
                self.commit(Status.HELD if self.machine.held is not None else self.machine.status)
        return self

    def resumes(self) -> Life:
        """An operator lets it go on, after a deploy."""
        self.machine = Machine(self.flow.program)
        self.machine.position = len(self.journal)
        self.machine.remark("resumed", "", {"by": "ann", "reason": ""}, NOON)
        return self.has(lambda machine: machine.replay([*self.journal, *machine.new]))

    def commit(self, status: Status) -> None:
        facts = self.machine.take_new()
        turn = turn_of(
            CLAIM,
            position=len(self.journal),
            machine=self.machine,
            facts=facts,
            inputs=Inputs(),
            mail_known=0,
            before=Status(self.statuses[-1]),
            status=status,
            release=False,
            clock=Clock(),
            wire=WIRE,
        )
        self.journal += facts
        self.statuses.append(turn.status)

    @property
    def moves(self) -> set[tuple[str, str]]:
        self.machine.evict()
        return set(pairwise(self.statuses))


CLAIM: Final = Claim(1, "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000", 1, 0, 0, 0, 0, "open", "lives", "1", NOON)
WIRE: Final = Wire("/waypost", "https://waypost.example/")


def resolved(path: str, verdict: str) -> Callable[[Machine], None]:
    said = {"verdict": verdict, "value": None, "by": "ann", "reason": ""}
    return lambda machine: machine.tell("resolved", path, said, NOON)


@workflow(name="lives", version="1")
async def lives(ctx: Context, n: int) -> None:
    await ctx.call("s", "a", undo=UNDO)
    await ctx.call("s", "b", unknown="hold")


def after_a(*happenings: Callable[[Machine], object]) -> Life:
    return Life(lives).has(lambda machine: done(machine, "a"), *happenings)


def undo_held(*happenings: Callable[[Machine], object]) -> Life:
    return after_a(
        lambda machine: refused(machine, "b"), lambda machine: refused(machine, "a/undo"), *happenings
    )


def buggy_until_mended() -> Life:
    mended = False

    @workflow(name="lives", version="1")
    async def breaks(ctx: Context, n: int) -> None:
        if not mended:
            raise AttributeError("a bug")

    life = Life(breaks).resumes()
    mended = True
    return life.resumes()


LIVES: Final[dict[str, Callable[[], Life]]] = {
    "all goes well": lambda: after_a(lambda machine: done(machine, "b")),
    "refused, nothing was done": lambda: Life(lives).has(lambda machine: refused(machine, "a")),
    "refused, and undone": lambda: after_a(
        lambda machine: refused(machine, "b"), lambda machine: done(machine, "a/undo")
    ),
    "cancelled": lambda: Life(lives).has(cancelled, lambda machine: refused(machine, "a")),
    "a person says that it was done": lambda: after_a(
        lambda machine: unknown(machine, "b"), resolved("b", "perhaps"), resolved("b", "done")
    ),
    "a person says that it was not": lambda: after_a(
        lambda machine: unknown(machine, "b"), resolved("b", "not_done")
    ),
    "an undo is tried again": lambda: undo_held(
        resolved("a/undo", "retry"), lambda machine: done(machine, "a/undo#2")
    ),
    "an undo counts as done": lambda: undo_held(resolved("a/undo", "done")),
    "what was done stands": lambda: undo_held(resolved("a/undo", "skip")),
    "cancelled, and its undo counts as done": lambda: after_a(
        cancelled, lambda machine: refused(machine, "a/undo"), resolved("a/undo", "done")
    ),
    "a bug, and a deploy that mends it": buggy_until_mended,
}


@pytest.mark.parametrize(
    ("life", "statuses"),
    [
        ("all goes well", "open open open completed"),
        ("refused, nothing was done", "open open failed"),
        ("refused, and undone", "open open open open compensated"),
        ("cancelled", "open open open cancelled"),
        ("a person says that it was done", "open open open held held completed"),
        ("a person says that it was not", "open open open held open"),
        ("an undo is tried again", "open open open open held open compensated"),
        ("an undo counts as done", "open open open open held compensated"),
        ("what was done stands", "open open open open held failed"),
        ("cancelled, and its undo counts as done", "open open open open held cancelled"),
        ("a bug, and a deploy that mends it", "open held held completed"),
    ],
)
def test_an_execution_moves_from_status_to_status_as_things_happen_to_it(life: str, statuses: str) -> None:
    assert " ".join(LIVES[life]().statuses) == statuses


def test_every_move_that_is_allowed_and_can_be_made_is_made_by_some_execution() -> None:
    made = {move for life in LIVES.values() for move in life().moves}

    assert made == ALLOWED - NOT_YET


@pytest.mark.parametrize(
    ("before", "after"), sorted(set(product([*ALIVE, *OVER], [*ALIVE, *OVER])) - ALLOWED)
)
def test_a_commit_that_would_lead_out_of_an_end_is_refused(before: str, after: str) -> None:
    life = Life(lives)
    life.statuses = [before]

    with pytest.raises(AssertionError, match=f"{before} to {after}"):
        life.commit(Status(after))
    life.machine.evict()


@pytest.mark.parametrize(
    ("life", "end"),
    [
        ("all goes well", "completed"),
        ("refused, and undone", "compensated"),
        ("what was done stands", "failed"),
        ("cancelled", "cancelled"),
    ],
)
def test_what_has_ended_takes_nothing_more_and_stays_as_it_is(life: str, end: str) -> None:
    over = LIVES[life]()

    over.machine.tell("received", "", {"type": "e", "key": "", "data": None}, NOON)
    cancelled(over.machine)
    done(over.machine, "b")
    resolved("a/undo", "retry")(over.machine)

    assert (over.machine.status, over.machine.new, over.machine.open) == (end, [], {})
    assert over.machine.next_due() is None


# ---- which end -------------------------------------------------------------------------------------------------


async def nothing_to_undo(ctx: Context) -> None:
    await ctx.call("s", "a")


async def undone_all(ctx: Context) -> None:
    await ctx.call("s", "a", undo=command("s", "undo"))


async def undone_inside(ctx: Context) -> None:
    try:
        async with ctx.saga():
            await ctx.call("s", "a", undo=UNDO)
            raise ValueError("inside")  # noqa: TRY301  # that is the case
    except ValueError:
        pass


async def stands_by_a_pivot(ctx: Context) -> None:
    await ctx.call("s", "a", undo=UNDO)
    ctx.pivot()


@pytest.mark.parametrize(
    ("does", "fails", "cancels"),
    [
        (nothing_to_undo, "failed", "cancelled"),
        (undone_all, "compensated", "cancelled"),
        (undone_inside, "compensated", "cancelled"),
        (stands_by_a_pivot, "failed", "cancelled"),
    ],
)
def test_an_error_ends_compensated_when_something_is_undone_and_nothing_stands_and_a_cancel_cancelled(
    does: Callable[[Context], Coroutine[Any, Any, None]], fails: str, cancels: str
) -> None:
    @workflow(name="ends", version="1")
    async def ends(ctx: Context, n: int) -> None:
        await does(ctx)
        await ctx.call("s", "last")

    failed, stopped = Life(ends), Life(ends)
    for life in (failed, stopped):
        for path in ("a", "a/undo"):
            if path in life.machine.open:
                done(life.machine, path)

    refused(failed.machine, "last")
    cancelled(stopped.machine)
    for life in (failed, stopped):
        if "a/undo" in life.machine.open:
            done(life.machine, "a/undo")

    assert (failed.machine.status, stopped.machine.status) == (fails, cancels)


def test_nothing_is_open_of_what_was_ended_without_its_program() -> None:
    @workflow(name="waits", version="1")
    async def waits(ctx: Context, n: int) -> None:
        await ctx.all(ctx.call("s", "a", undo=UNDO), ctx.call("s", "b", mutex="m"))

    life = Life(waits)
    by_ann = Fact(len(life.journal) + 1, "terminated", "", {"kind": "failed", "by": "ann"}, NOON)
    machine = Machine(waits.program)
    machine.replay([*life.journal, by_ann])

    assert [ask.path for ask in waiting.open_in(life.journal).asks] == ["all.0/a", "all.1/b/mutex"]
    assert waiting.open_in([*life.journal, by_ann]).asks == []
    assert (machine.status, machine.open) == ("failed", {})
