"""One try of a local step: what it is told, what it returns, and what becomes of what it raises."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, cast
from uuid import UUID

import pytest
from pydantic import BaseModel

from contracts import Refused, strict_json
from orchestrator.core.ask import Ask
from orchestrator.core.errors import UsageError
from orchestrator.core.terms import local, result_adapter
from orchestrator.engine.attempt import (
    Done,
    Failure,
    Refusal,
    Result,
    Stopped,
    found,
    read_back,
    run,
)
from orchestrator.engine.pulse import Attempt, attempt
from orchestrator.store.database import Connection
from orchestrator.testing import NOON

Json = Any


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Money(BaseModel):
    amount: Decimal
    at: datetime


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def tried(fn: Callable[..., Any], *args: Any, threads: ThreadPoolExecutor, number: int = 1) -> Result:
    ask = Ask("step", "work", {"do": "step"}, work=(fn, args))
    ask.attempt, ask.due = number, NOON
    return await run(ask, key="key", threads=threads)


# ---- what it is told -------------------------------------------------------------------------------------------


async def test_a_plain_function_runs_in_a_thread_and_a_coroutine_function_on_the_loop(
    threads: ThreadPoolExecutor,
) -> None:
    async def on_loop() -> int:
        return threading.get_ident()

    here, there = await tried(on_loop, threads=threads), await tried(threading.get_ident, threads=threads)

    assert here == Done(threading.get_ident())
    assert isinstance(there, Done) and there.value != threading.get_ident()


async def test_what_is_awaitable_is_awaited_whatever_made_it(threads: ThreadPoolExecutor) -> None:
    async def doubles(n: int) -> int:
        return n * 2

    def plain(n: int) -> Any:
        return doubles(n)

    results = [
        await tried(plain, 4, threads=threads),
        await tried(functools.partial(doubles, 4), threads=threads),
    ]

    assert results == [Done(8), Done(8)]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_step_knows_its_key_its_number_and_its_deadline(
    threads: ThreadPoolExecutor, asynchronous: bool
) -> None:
    told: list[Attempt] = []

    async def on_loop() -> None:
        told.append(attempt())

    def in_thread() -> None:
        told.append(attempt())

    await tried(on_loop if asynchronous else in_thread, threads=threads, number=3)

    assert told == [Attempt("key", 3, NOON)]


def test_outside_of_a_step_there_is_no_try() -> None:
    with pytest.raises(UsageError, match="no step runs here"):
        attempt()


# ---- what it returns -------------------------------------------------------------------------------------------


def untyped(value: Any) -> Any:
    return value


def returns_money(value: Money) -> Money:
    return value


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (2.5, 2.5),
        (-0.0, 0.0),
        (1e300, 10**300),
        ("ü", "ü"),
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: "a"}, {"1": "a"}),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        ({"c": Colour.RED, "l": [Level.HIGH]}, {"c": "red", "l": [3]}),
        (datetime(2027, 1, 1, tzinfo=UTC), "2027-01-01T00:00:00Z"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (Decimal("1.10"), "1.10"),
        (b"bytes", "bytes"),
        ({"set"}, ["set"]),
        (Money(amount=Decimal("1.1"), at=NOON), {"amount": "1.1", "at": "2027-01-15T12:00:00Z"}),
    ],
    ids=repr,
)
async def test_a_result_is_told_as_the_journal_will_give_it_back(
    threads: ThreadPoolExecutor, value: Any, kept: Json
) -> None:
    result = await tried(untyped, value, threads=threads)

    assert isinstance(result, Done)
    assert (result.value, type(result.value)) == (kept, type(kept))
    assert json.loads(strict_json.encode(result.value, what="result")) == kept


async def test_a_result_with_an_annotation_is_read_back_by_it(threads: ThreadPoolExecutor) -> None:
    money = Money(amount=Decimal("1.1"), at=NOON)

    result = await tried(returns_money, money, threads=threads)

    adapter = result_adapter(returns_money)
    assert isinstance(result, Done) and adapter is not None
    assert adapter.validate_python(result.value) == money


async def test_members_come_in_the_order_in_which_a_replay_finds_them(threads: ThreadPoolExecutor) -> None:
    result = await tried(untyped, {"zebra": 1, "ant": {"b": 1, "a": 2}, "é": 3, "bc": 4}, threads=threads)

    assert isinstance(result, Done)
    assert list(result.value) == ["bc", "é", "ant", "zebra"]
    assert list(result.value["ant"]) == ["a", "b"]


def anything(chance: random.Random, depth: int = 0) -> Json:
    """Some JSON, with names and numbers that a database might write otherwise."""
    kind = chance.randrange(9 if depth < 3 else 6)
    words = ["", "a", "b", "aa", "B", "ü", "日本", "😀", "a b", "\\", '"', "zzz", "10", "9", "e\u0301"]
    match kind:
        case 0:
            return chance.choice([None, True, False])
        case 1:
            return chance.randrange(-(10**30), 10**30)
        case 2 | 3:
            sign = chance.choice([1, -1])
            return sign * chance.choice(
                [0.0, 1.0, 0.1, 1e15, 1e16, 1e22, 1.5e-7, 5e-324, 1.7e308, chance.random()]
            )
        case 4 | 5:
            return chance.choice(words)
        case 6:
            return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
        case _:
            return {word: anything(chance, depth + 1) for word in chance.sample(words, chance.randrange(8))}


def exact(value: Json) -> Json:
    """`value` so that order and kind of everything in it are compared, too."""
    if isinstance(value, dict):
        return [(name, exact(item)) for name, item in cast("dict[str, Json]", value).items()]
    if isinstance(value, list):
        return [exact(item) for item in cast("list[Json]", value)]
    return type(value), repr(value)


async def test_that_is_the_form_which_the_database_gives_back(conn: Connection) -> None:
    chance = random.Random(7)
    values = [anything(chance) for _ in range(2000)]

    told = [read_back(value) for value in values]
    cursor = await conn.execute(
        "select t::jsonb::text from unnest(%s::text[]) with ordinality as v(t, n) order by n",
        ([strict_json.encode(value, what="value") for value in values],),
    )
    stored = [json.loads(text) for (text,) in await cursor.fetchall()]

    assert [exact(value) for value in told] == [exact(value) for value in stored]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, object(), {object(): 1}, "\ud800"],
    ids=["NaN", "infinity", "object", "key", "surrogate"],
)
async def test_what_has_no_json_form_is_left_for_whoever_encodes_it(
    threads: ThreadPoolExecutor, value: Any
) -> None:
    result = await tried(untyped, value, threads=threads)

    assert isinstance(result, Done)
    with pytest.raises(strict_json.NotEncodable):
        strict_json.encode(result.value, what="result")


# ---- what it raises --------------------------------------------------------------------------------------------


def raises(error: BaseException) -> None:
    raise error


class Outside(BaseException): ...


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no\x00 \ud800"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Outside("x"),
        TimeoutError("x"), RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_whatever_a_step_raises_is_a_failure_that_says_what_and_where(
    threads: ThreadPoolExecutor, error: BaseException, asynchronous: bool
) -> None:
    async def raises_on_loop() -> None:
        raise error

    result = await (
        tried(raises_on_loop, threads=threads) if asynchronous else tried(raises, error, threads=threads)
    )

    assert isinstance(result, Failure)
    assert result.error["code"] == "raised"
    assert result.error["detail"].startswith(type(error).__name__)
    assert "raises" in result.error["at"]
    strict_json.encode(result.error, what="error")


async def test_a_step_that_runs_out_of_an_iterator_is_a_failure_and_ends(threads: ThreadPoolExecutor) -> None:
    result = await tried(next, iter([]), threads=threads)

    assert isinstance(result, Failure)
    assert result.error["detail"] == "StopIteration"


async def test_refused_is_definitely_not_done_and_keeps_its_words(threads: ThreadPoolExecutor) -> None:
    result = await tried(raises, Refused("sold-out", "none left", detail={"zz": 1, "a": 2}), threads=threads)

    assert result == Refusal({"code": "sold-out", "detail": "none left", "data": {"a": 2, "zz": 1}})


def circular() -> list[Any]:
    one: list[Any] = []
    one.append(one)
    return one


@pytest.mark.parametrize(
    "detail",
    [math.nan, object(), circular(), "\x00", "x" * 300_000],
    ids=["NaN", "object", "circular", "NUL", "large"],
)
async def test_a_detail_that_cannot_be_stored_is_left_out_and_the_refusal_stands(
    threads: ThreadPoolExecutor, detail: Any
) -> None:
    result = await tried(raises, Refused("no\x00", "n\ud800", detail=detail), threads=threads)

    assert result == Refusal({"code": "no�", "detail": "n?"})


async def test_a_refusal_without_detail_has_no_data(threads: ThreadPoolExecutor) -> None:
    assert await tried(raises, Refused("no"), threads=threads) == Refusal({"code": "no", "detail": ""})


async def test_a_coroutine_that_is_cancelled_half_way_is_stopped(threads: ThreadPoolExecutor) -> None:
    began = asyncio.Event()

    async def waits() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(tried(waits, threads=threads))
    await began.wait()
    task.cancel()

    assert await task == Stopped()


async def test_a_thread_that_is_cancelled_runs_to_its_end(threads: ThreadPoolExecutor) -> None:
    began, may_end = threading.Event(), threading.Event()

    def waits() -> str:
        began.set()
        may_end.wait(30)
        return "done after all"

    task = asyncio.create_task(tried(waits, threads=threads))
    await asyncio.to_thread(began.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()

    assert await task == Done("done after all")


# ---- functions by name -----------------------------------------------------------------------------------------


def takes_money(money: Money, n: int = 5) -> tuple[Money, int]:
    return money, n


def takes_many(first: int, *rest: Money) -> list[Any]:
    return [first, *rest]


MONEY = Money(amount=Decimal(1), at=NOON)


def test_an_undo_is_found_by_name_and_its_arguments_are_read_by_its_annotations() -> None:
    action = json.loads(json.dumps(local(takes_money, MONEY).as_action()))

    fn, args = found(action)

    assert (fn, args) == (takes_money, (MONEY,))


def test_all_arguments_of_a_function_that_takes_many_are_kept() -> None:
    fn, args = found(json.loads(json.dumps(local(takes_many, 1, MONEY, MONEY).as_action())))

    assert fn(*args) == [1, MONEY, MONEY]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("takes_money", [{"amount": "much", "at": "today"}], "no longer fit: 2 errors"),
        ("takes_money", [], "no longer fit: missing a required argument: 'money'"),
        ("takes_money", [{"amount": "1", "at": "2027-01-15T12:00:00Z"}, 1, 2], "no longer fit: too many"),
        ("gone", [], "no function .*:gone"),
        ("MONEY", [], "is no function"),
        ("takes_money.deeper", [], "no function"),
    ],
)
def test_a_function_that_is_gone_or_takes_something_else_is_named(
    name: str, data: list[Json], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        found({"do": "step", "name": f"{__name__}:{name}", "data": data})


def test_a_module_that_is_gone_is_named() -> None:
    with pytest.raises(UsageError, match="it was there when its step was recorded"):
        found({"do": "step", "name": "no.such.module:fn", "data": []})


async def test_an_undo_that_cannot_be_found_is_a_failure(threads: ThreadPoolExecutor) -> None:
    ask = Ask("undo", "work", {"do": "step", "name": "no.such.module:fn", "data": []})

    result = await run(ask, key="key", threads=threads)

    assert isinstance(result, Failure)
    assert result.error["detail"].startswith("UsageError: no function no.such.module:fn")


class Opaque: ...


def returns_opaque() -> Opaque:
    return Opaque()


def test_a_result_that_no_journal_can_keep_is_a_bug_that_names_the_step() -> None:
    with pytest.raises(TypeError, match="step returns_opaque: no journal can keep its result"):
        result_adapter(returns_opaque)


async def test_the_code_of_an_error_is_its_own_where_that_is_a_word(threads: ThreadPoolExecutor) -> None:
    class Busy(Exception):
        code = "busy"

    class Numbered(Exception):
        code = 404

    class Broken(Exception):
        @property
        def code(self) -> str:
            raise ValueError

    async def raises(error: Exception) -> None:
        raise error

    results = [await tried(raises, error(), threads=threads) for error in (Busy, Numbered, Broken)]

    assert [isinstance(it, Failure) and it.error["code"] for it in results] == ["busy", "raised", "raised"]
