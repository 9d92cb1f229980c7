"""Every statement of ours prepares against the migrated schema: a renamed column fails here, in a second."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from psycopg.pq import ExecStatus

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("orchestrator", "relay", "receiver")
SQL: Final = re.compile(r"\s*(select|with|insert|update|delete|create|drop|alter|listen|notify|set)\s")
PARAMETER: Final = re.compile(r"%%|%\((\w+)\)[sbt]")


def constants() -> Iterator[tuple[str, str]]:
    """Module and name of each upper-case constant that is SQL for PostgreSQL."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if "sqlite3" in imported(tree):
                continue  # a service's own memory
            if path.match("orchestrator/testing/*.py"):
                continue  # the clock of tests, which only their databases have: tests/testing
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield from ((module, name) for name in statements(tree))


def imported(tree: ast.Module) -> set[str]:
    return {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}


def statements(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case _:
                continue
        if name.isupper() and SQL.match(first_text(value)):
            yield name


def first_text(value: ast.expr) -> str:
    """The text that a string expression begins with."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[first, *_]):
            return first_text(first)
        case ast.BinOp(left=left):
            return first_text(left)
        case _:
            return ""


def numbered(statement: str) -> str:
    """`%(name)s`, as psycopg reads it, as `$1`, as PostgreSQL does; one name is one number."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        return f"${numbers.setdefault(found[1], len(numbers) + 1)}"

    return PARAMETER.sub(number, statement)


STATEMENTS: Final = list(constants())


@pytest.mark.postgres
@pytest.mark.parametrize(("module", "name"), STATEMENTS, ids=[f"{m}.{n}" for m, n in STATEMENTS])
async def test_a_statement_prepares(conn: psycopg.AsyncConnection[Any], module: str, name: str) -> None:
    statement: str = getattr(importlib.import_module(module), name)

    prepared = conn.pgconn.prepare(b"", numbered(statement).encode())

    assert prepared.status == ExecStatus.COMMAND_OK, prepared.get_error_message()


def test_statements_are_found() -> None:
    assert ("orchestrator.store.database", "READ_SETTINGS") in STATEMENTS
    assert ("receiver.inbox", "POST") in STATEMENTS
    assert ("relay.outbox", "CLAIM") in STATEMENTS
    assert not [module for module, _ in STATEMENTS if module == "receiver.memory"]


def test_a_parameter_that_is_named_twice_is_one() -> None:
    assert numbered("select %(a)s, %(b)s::int, %(a)s, 5 %% 2") == "select $1, $2::int, $1, 5 % 2"
