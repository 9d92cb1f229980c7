"""`waypost trace` draws what the database says: golden text, and the same as data."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from contracts import trace
from contracts.identifiers import execution_key, message_id
from orchestrator.cli.trace import DRAWN, TYPED, lines, span_of_time, whole
from orchestrator.store.reading import FactRow, MessageRow
from orchestrator.store.situation import Situation
from orchestrator.store.spans import Arrival
from orchestrator.store.tries import TryRow
from orchestrator.telemetry.tree import Traced, in_order, traced
from tests.why.case import ID, NOW, case

GOLDEN: Final = Path(__file__).with_name("trace.txt")
TRACE: Final = "00-7ad40000000000000000000000000001-00000000000000aa-01"
RESERVE: Final = {"do": "call", "endpoint": "inventory", "name": "stock.reserve"}
CHARGE: Final = {"do": "call", "endpoint": "pay\x1b[2Jments", "name": "payment.charge"}


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


Said = tuple[float, str, str, dict[str, Any]]

JOURNAL: Final[list[Said]] = [
    (-90, "started", "", {"traceparent": TRACE}),
    (
        -90,
        "asked",
        "reserve",
        {"kind": "call", "name": "reserve", "args": RESERVE, "due": at(900).isoformat()},
    ),
    (-86, "ended", "reserve", {"outcome": "done"}),
    (-86, "asked", "pack", {"kind": "step", "name": "pack", "args": {"do": "step", "name": "shop:pack"}}),
    (-85.5, "attempted", "pack", {"attempt": 1, "error": {"code": "raised"}, "next_at": at(-84).isoformat()}),
    (-80, "orphaned", "", {"by": "worker-1"}),
    (-79, "ended", "pack", {"outcome": "done", "value": 1}),
    (-79, "asked", "sleep", {"kind": "timer", "name": "sleep", "due": at(-60).isoformat()}),
    (-60, "ended", "sleep", {"outcome": "done"}),
    (-60, "asked", "charge", {"kind": "call", "name": "charge", "args": CHARGE, "due": at(840).isoformat()}),
]


def facts(said: list[Said]) -> list[FactRow]:
    return [
        FactRow(number, kind, path, "program", 1, at(when), at(when), json.dumps(data))
        for number, (when, kind, path, data) in enumerate(said, start=1)
    ]


def message(path: str, asked_at: float, endpoint: str, **more: Any) -> MessageRow:
    row = MessageRow(
        message_id=str(message_id(ID, 0, path, at=at(asked_at))), path=path, endpoint=endpoint, state="delivered",
        attempts=2, reached=True, replied=True, due_at=at(asked_at), expires_at=at(900), lease_until=None, tried=2,
        outcome="delivered", http_status=202, error_code=None, tried_at=at(asked_at), took=timedelta(seconds=1),
    )  # fmt: skip
    return replace(row, **more)


def tried(
    row: MessageRow, attempt: int, began: float, *, took: float, outcome: str, status: int | None
) -> TryRow:
    code = "timeout" if status is None else None
    return TryRow(
        row.message_id, row.path, attempt, at(began), timedelta(seconds=took), outcome, status, code
    )


def order() -> tuple[Situation, Traced]:
    """An order that waits for a payment, after a reservation, a step whose worker died, and a sleep."""
    reserve = message("reserve", -90, "inventory")
    charge = message("charge", -60, "pay\x1b[2Jments", attempts=3, replied=False, tried=3)
    it = case(wake=840, messages=[reserve, charge], status="open")
    it = replace(
        it,
        facts=facts(JOURNAL),
        row=replace(
            it.row,
            state="waiting",
            business_key="order\x1b[31m-7\u202e",
            position=len(JOURNAL),
            wake_at=at(840),
        ),
    )
    tries = [
        tried(reserve, 1, -89.9, took=1.9, outcome="retry", status=503),
        tried(reserve, 2, -87, took=0.04, outcome="delivered", status=202),
        tried(charge, 1, -59.9, took=15, outcome="retry", status=None),
        tried(charge, 3, -40, took=0.2, outcome="delivered", status=202),
    ]
    created = trace.child(TRACE, execution_key(ID, 0, "reserve"))
    arrivals = [
        Arrival(1, "inventory", "/inventory", "r-1", "stock.reserve.done", "mail", at(-86.5), ID, created)
    ]
    return it, traced(it, tries, arrivals, gap=None)


def test_a_trace_is_drawn_as_in_the_golden_text() -> None:
    it, found = order()

    drawn = "\n".join(lines(it, found, marks=DRAWN, width=None)) + "\n"
    typed = "\n".join(lines(it, found, marks=TYPED, width=None)) + "\n"

    assert drawn + "\n" + typed == GOLDEN.read_text(encoding="utf-8")
    assert typed.isascii()


def test_nothing_hostile_reaches_the_terminal() -> None:
    text = "".join(lines(*order(), marks=DRAWN, width=None))

    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"order\x1b[31m-7\u202e" in text


def test_a_line_is_no_wider_than_the_terminal() -> None:
    it, found = order()

    drawn = list(lines(it, found, marks=DRAWN, width=60))[1 : 3 + len(found.spans)]

    assert max(len(line) for line in drawn) == 60


def test_the_same_is_there_as_data() -> None:
    it, found = order()

    data = whole(it, found)

    assert data["trace_id"] == "7ad40000000000000000000000000001"
    assert [span["depth"] for span in data["spans"]] == [depth for depth, _ in in_order(found.spans)]
    assert {span["name"]: span["seconds"] for span in data["spans"]}["timer sleep"] == 19
    assert data["tries_without_a_record"] == {it.messages[1].message_id: [2]}


def test_every_span_is_drawn_once_and_parents_come_first() -> None:
    _, found = order()

    drawn = [span for _, span in in_order(found.spans)]

    assert sorted(map(str, drawn)) == sorted(map(str, found.spans))
    seen: set[str] = set()
    for span in drawn:
        assert (
            span.parent is None or span.parent in seen or span.parent not in {one.at.span_id for one in drawn}
        )
        seen.add(span.at.span_id)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0124, "12 ms"),
        (1.94, "1.9 s"),
        (72, "1 m 12 s"),
        (7380, "2 h 3 m"),
        (273_600, "3 d 4 h"),
        (-1, "0 ms"),
    ],
)
def test_a_time_is_said_in_two_units_at_most(seconds: float, text: str) -> None:
    assert span_of_time(timedelta(seconds=seconds)) == text
