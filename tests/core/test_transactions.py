"""Transactions: what they come to is exact, so nothing of them is ever unknown."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from contracts import Command
from orchestrator import Context, StepRefused, UsageError, local, minutes, workflow
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.past import ending
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import bare


class Booked(BaseModel):
    number: int


class Tell(Command[None], endpoint="desk", type="desk.tell"):
    number: int


async def book(conn: Any, seats: int) -> Booked:
    return Booked(number=seats)


def book_plainly(conn: Any, seats: int) -> None: ...


async def unbook(number: int) -> None: ...


def unbooks(booked: Booked) -> Any:
    return local(unbook, booked.number)


@workflow(name="books", version="1")
async def books(ctx: Context, seats: int) -> int:
    booked = await ctx.transaction(book, seats, undo=unbooks)
    await ctx.call(Tell(number=booked.number))
    return booked.number


@workflow(name="books-or-not", version="1")
async def books_or_not(ctx: Context, seats: int) -> str:
    try:
        await ctx.transaction(book, seats, undo=unbooks, name="seats")
    except StepRefused as no:
        return f"{no.path} {no.code} {no.may_have_acted}"
    return "booked"


@workflow(name="books-in-time", version="1")
async def books_in_time(ctx: Context, seats: int) -> str:
    winner = await ctx.first(ctx.transaction(book, seats, undo=unbooks), ctx.sleep(minutes(1)))
    return type(winner).__name__


def test_what_a_transaction_returned_is_read_by_its_annotation() -> None:
    flow = FlowTester(books, 2)
    flow.expect(book).replies(Booked(number=7))
    flow.expect(Tell(number=7)).replies()

    assert (flow.status, flow.returned) == ("completed", 7)


def test_before_it_has_ended_there_is_nothing_to_undo_and_afterwards_its_undo_has_the_result() -> None:
    flow = FlowTester(books, 2)
    asked = flow.journal[-1]
    flow.expect(book).replies(Booked(number=7))
    ended = flow.journal[-2]
    flow.expect(Tell).refuses("closed")

    assert (asked.kind, asked.data["kind"], "undo" in asked.data) == ("asked", "transaction", False)
    assert (ended.kind, ended.data["undo"]["data"]) == ("ended", [7])
    flow.expect(unbook).replies()
    assert flow.status == "compensated"


def test_a_refused_transaction_is_definitely_not_done_and_not_undone() -> None:
    flow = FlowTester(books_or_not, 2)
    flow.expect(book).refuses("sold-out")

    assert flow.returned == "seats sold-out False"


def test_a_bug_is_tried_again_as_that_of_a_step_is_and_is_refused_in_the_end() -> None:
    flow = FlowTester(books_or_not, 2)
    for _ in range(5):
        flow.expect(book).raises(TypeError("a bug"))
        flow.passes(minutes(1))

    assert flow.returned == "seats raised False"
    assert [fact.kind for fact in flow.journal].count("attempted") == 4


def test_one_that_is_given_up_was_not_done() -> None:
    flow = FlowTester(books_in_time, 2)
    flow.passes(minutes(1))

    assert (flow.status, flow.returned) == ("completed", "Elapsed")
    assert [fact.kind for fact in flow.journal][-3:] == ["ended", "withdrawn", "finished"]


@pytest.mark.parametrize("how", ["fails", "is_unknown", "runs_out"])
def test_a_test_cannot_make_it_unknown(how: str) -> None:
    flow = FlowTester(books, 2)

    with pytest.raises(AssertionError, match="a transaction is done or refused"):
        getattr(flow.expect(book), how)()


def test_workers_that_died_leave_it_to_the_next_one_and_refused_at_last() -> None:
    machine = bare(books_or_not.run)
    facts = machine.take_new()
    machine.evict()
    said = facts
    for n in range(5):
        facts.append(Fact(facts[-1].position + 1, "orphaned", "", {"by": "w"}, NOON, actor="worker"))
        machine = Machine(books_or_not.program)
        machine.replay(facts, now=NOON)
        runs = [ask.attempt for ask in machine.runnable()]
        assert runs == ([n + 2] if n < 4 else [])
        said = machine.take_new()
        machine.evict()

    assert machine.result == "seats worker-lost False"
    assert said[0].data["outcome"] == "refused"


def test_its_end_may_be_the_last_that_a_journal_has() -> None:
    flow = FlowTester(books, 2)
    flow.expect(book).replies(Booked(number=7))
    alone = flow.journal[:-1]
    machine = Machine(books.program)

    machine.replay(alone, now=NOON)

    assert (alone[-1].kind, ending(alone)) == ("ended", (3, True))
    assert [(fact.position, fact.path) for fact in machine.new] == [(4, "tell")]
    machine.evict()


def test_the_fact_that_is_stored_before_the_program_sees_it_is_the_one_that_it_would_be_told() -> None:
    told, shown = bare(books.run), bare(books.run)
    told.tell("ended", "book", {"outcome": "done", "value": {"number": 7}}, NOON)
    fact = shown.foresee("book", {"number": 7}, NOON)
    assert len(shown.new) == 2, "nothing has happened yet"
    shown.believe(fact)

    assert [repr(one) for one in told.new[2:]] == [repr(one) for one in [fact, *shown.new[2:]]]
    for machine in (told, shown):
        machine.evict()


def test_what_is_no_coroutine_function_is_refused_when_it_is_asked() -> None:
    @workflow(name="plain", version="1")
    async def plain(ctx: Context, seats: int) -> str:
        with pytest.raises(
            UsageError, match=r"ctx.transaction\(book_plainly\): expected a coroutine function"
        ):
            await ctx.transaction(book_plainly, seats)  # pyright: ignore[reportArgumentType]
        return "refused"

    assert FlowTester(plain, 1).returned == "refused"


@pytest.mark.parametrize("option", ["effect", "retry", "unknown", "timeout", "probe"])
def test_promises_about_what_nobody_knows_are_no_options(option: str) -> None:
    context: Any = Context(bare(books.run))

    with pytest.raises(TypeError, match=option):
        context.transaction(book, 1, **{option: None})
