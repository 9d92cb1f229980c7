"""Where things may stand: SQL beside the function that runs it, connections to the world in few places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("contracts", "relay", "receiver", "orchestrator", "migrations", "examples")

SQL: Final = re.compile(
    r"\b(select|insert\s+into|update|delete\s+from|call)\b[\s\S]*\bwaypost\.", re.IGNORECASE
)
SPEAKS_SQL: Final = re.compile(
    r"orchestrator/(store/\w+|testing/clock)\.py|relay/(outbox|endpoints|health|replies)\.py"
    r"|receiver/(data|inbox|quarantine|senders|streams)\.py|migrations/runner\.py"
)
SPEAKS_HTTP: Final = re.compile(
    r"relay/\w+\.py|receiver/\w+\.py|examples/shop/\w+\.py"
    r"|orchestrator/(telemetry/health|testing/service|testing/installation|simulators/provider)\.py"
)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def texts(tree: ast.Module) -> Iterator[str]:
    """String constants, but for docstrings and other bare strings, which are prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


def test_sql_stands_only_where_it_is_prepared() -> None:
    speaking = {name for name, tree in modules() if any(SQL.search(text) for text in texts(tree))}

    assert speaking, "the search finds no SQL at all"
    assert {name for name in speaking if not SPEAKS_SQL.fullmatch(name)} == set()


def test_http_is_spoken_only_by_the_relay_the_receiver_and_services() -> None:
    speaking = {name for name, tree in modules() if "aiohttp" in imports(tree)}

    assert speaking, "the search finds no HTTP at all"
    assert {name for name in speaking if not SPEAKS_HTTP.fullmatch(name)} == set()


def test_pools_are_made_in_one_place() -> None:
    making = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AsyncConnectionPool")
    }

    assert making == {"orchestrator/store/database.py"}
