"""The page for applications: code and statements run in a role without rights, and its codes are all there are."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import psycopg
import pytest

from examples.shop.contracts import Order
from orchestrator.flows import load
from orchestrator.store import definitions
from tests.habits.documents import blocks, code_in, files_in, table, text_of

PAGE: Final = "docs/applications.md"
SCRIPT: Final = "migrations/0011_errands.sql"
TABLES: Final = """
    create schema shop;
    create table shop.orders (id text primary key, total int not null);
    create table shop.calls (customer text not null);
"""


@pytest.fixture
def checkout(tmp_path: Path) -> ModuleType:
    path = tmp_path / "checkout.py"
    path.write_text(files_in(PAGE)["checkout.py"], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("checkout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def shop(conn: psycopg.AsyncConnection[Any], dsn: str) -> Any:
    """A connection of the application, whose role has the rights that the page grants."""
    _, rights, hints = blocks(PAGE, "sql")
    await conn.execute(TABLES)
    await definitions.publish(conn, load(["examples.shop.flows"]).definitions())
    await conn.execute(rights.encode())
    await conn.execute(hints.encode())
    await conn.execute("grant usage on schema shop to shop; grant all on all tables in schema shop to shop")
    await conn.execute(
        "insert into waypost.endpoint (tenant_id, name, url, kind) values (1, 'billing', 'https://x.test', 'event');"
        " insert into waypost.subscription (tenant_id, type, endpoint) values (1, 'shop.order.placed', 'billing')"
    )
    try:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as shop:
            await shop.execute("set role shop")
            yield shop
    finally:
        await conn.execute("drop owned by shop; drop role shop")


async def counts(conn: psycopg.AsyncConnection[Any]) -> tuple[int, ...] | None:
    cursor = await conn.execute(
        "select (select count(*) from shop.orders), (select count(*) from shop.calls),"
        "       (select count(*) from waypost.execution), (select count(*) from waypost.inbox),"
        "       (select count(*) from waypost.outbox)"
    )
    return await cursor.fetchone()


async def test_the_python_of_the_page_runs(
    checkout: ModuleType,
    conn: psycopg.AsyncConnection[Any],
    shop: psycopg.AsyncConnection[Any],
    dsn: str,
) -> None:
    order = Order(id="A-1042", customer="Ann", total=4200)

    await checkout.place(shop, order)
    with psycopg.connect(dsn) as waits:
        checkout.called(waits, "Ann")
    assert await counts(conn) == (1, 1, 1, 1, 1)

    with pytest.raises(psycopg.errors.UniqueViolation):
        await checkout.place(shop, order)
    assert await counts(conn) == (1, 1, 1, 1, 1)


async def test_the_sql_of_the_page_runs(
    conn: psycopg.AsyncConnection[Any], shop: psycopg.AsyncConnection[Any]
) -> None:
    await shop.execute(blocks(PAGE, "sql")[0].encode())

    assert await counts(conn) == (1, 0, 1, 1, 1)


def test_the_codes_of_the_page_are_those_of_the_functions() -> None:
    raised = set(re.findall(r"errcode = '(\w+)'", text_of(SCRIPT)))
    listed = {code_in(cells[0])[0] for cells in table(PAGE, "code")}

    assert listed == raised | {"40P01"}


def functions() -> Iterator[tuple[str, list[str]]]:
    script = text_of(SCRIPT)
    for name in ("start", "signal", "publish"):
        [arguments] = re.findall(rf"create function waypost\.{name}\((.*?)\) returns", script, re.DOTALL)
        yield name, re.findall(r"(\w+) \w+ default", arguments)


def test_every_optional_argument_is_named() -> None:
    said = " ".join(text_of(PAGE).split()).partition("The optional arguments are ")[2].partition(".")[0]
    named = {code_in(part)[-1]: code_in(part)[:-1] for part in said.split(";")}

    assert named == dict(functions())
