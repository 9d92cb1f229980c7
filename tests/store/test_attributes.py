"""Conditions about attributes: how values of each type compare, and which index serves them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import pytest

from contracts.limits import CONDITIONS_MAX
from orchestrator.conditions import conditions
from orchestrator.store import reading
from orchestrator.store.attributes import NUMBERS, SUCH, Condition, clauses
from tests.store.world import Connection

pytestmark = pytest.mark.postgres

NOON: Final = datetime(2026, 12, 1, 12, tzinfo=UTC)
HAVE: Final[dict[str, dict[str, Any]]] = {
    "A": {"text": "paid"},
    "B": {"text": "Paid"},
    "C": {"text": "100"},
    "D": {"number": 100},
    "E": {"number": "99.5"},
    "F": {"flag": True},
    "G": {"moment": NOON},
    "H": {},
}


@pytest.fixture
async def executions(conn: Connection) -> Connection:
    """One execution for each of HAVE, whose attribute `it` it has."""
    for key, values in HAVE.items():
        execution = uuid4()
        await conn.execute(
            "insert into waypost.execution (tenant_id, execution_id, definition, version, business_key, input_digest,"
            " position, events_after) values (1, %s, 'order', '1', %s, '', 1, 0)",
            (execution, key),
        )
        if values:
            await conn.execute(
                "insert into waypost.attribute (tenant_id, execution_id, name, text, number, flag, moment)"
                " values (1, %s, 'it', %s, %s, %s, %s)",
                (execution, *(values.get(column) for column in ("text", "number", "flag", "moment"))),
            )
    return conn


async def found(conn: Connection, *where: str | Condition) -> str:
    rows = await reading.newest(
        conn, tenant=1, states=None, flow=None, key=None, limit=50, where=conditions(where)
    )
    return "".join(sorted(row.business_key or "" for row in rows))


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        ("it=paid", "A"),
        ("it!=paid", "BCDEFG"),
        ("it>=Paid", "AB"),
        ("it<paid", "BC"),
        ('it="100"', "C"),
        ("it=100", "D"),
        ("it=1e2", "D"),
        ("it<100", "E"),
        ("it<=100", "DE"),
        ("it!=100", "ABCEFG"),
        ("it=true", "F"),
        ("it=false", ""),
        ("it!=false", "ABCDEFG"),
        ("it>2026-12-01T11:59:59Z", "G"),
        ("it=2026-12-01T13:00+01:00", "G"),
        ("other=paid", ""),
    ],
)
async def test_values_compare_with_values_of_their_type(
    executions: Connection, where: str, keys: str
) -> None:
    assert await found(executions, where) == keys


async def test_several_conditions_have_to_hold_all(executions: Connection) -> None:
    assert await found(executions, "it>=99", "it<100") == "E"
    assert await found(executions, *["it=paid"] * CONDITIONS_MAX) == "A"


async def test_every_comparison_is_a_statement(conn: Connection) -> None:
    values = {str: "x", int: 1, bool: True, datetime: NOON}
    for kind, operator in SUCH:
        text, parameters = clauses([Condition("it", operator, values[kind])])
        await conn.execute("explain select 1 from waypost.execution e where true" + text, parameters)
    assert len(NUMBERS) == CONDITIONS_MAX
