"""What the product's source says that there is: each statement of SQL by its name, which of them commit something,
and which functions send requests.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGES: Final = ("migrations", "orchestrator", "receiver", "relay")
APPLICATION: Final = "tests.crash.flows"
"""The module of an application that writes a table of its own."""
SQL: Final = re.compile(
    r"\s*(select|with|insert|update|delete|merge|create|drop|alter|listen|notify|set)\s", re.IGNORECASE
)
WRITES: Final = re.compile(
    r"\b(insert\s+into|delete\s+from|merge\s+into|update\s+(?!skip|of|nowait|set)[a-z]|(create|drop|alter)\s"
    r"|pg_notify)"
)
CALLS: Final = re.compile(r"\bwaypost\.(\w+)\s*\(")
READERS: Final = frozenset({"attributes_of", "draw_of", "facts_of", "version_drawn", "type_in"})
"""Functions of the database that statements call and that write nothing. All others are taken to write."""


def modules() -> Iterator[str]:
    """The names of the product's modules that may have statements."""
    yield APPLICATION
    for package in PACKAGES:
        yield package
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith("__main__") and not found.name.startswith("orchestrator.testing"):
                yield found.name


def named() -> dict[str, str]:
    """The name of each statement, by its text: the module that defines it, and the constant."""
    names: dict[str, str] = {}
    for module in modules():
        found = importlib.import_module(module)
        defined = getattr(found, "__annotations__", {})
        for name, value in vars(found).items():
            if name.isupper() and name in defined and isinstance(value, str) and SQL.match(value):
                assert value not in names, f"{names[value]} and {module}.{name} are the same text"
                names[value] = f"{module}.{name}"
    return names


def commits(text: str) -> bool:
    """Whether a statement writes, so that there is something to commit."""
    return WRITES.search(text) is not None or bool({*CALLS.findall(text)} - READERS)


def committing() -> frozenset[str]:
    """The names of the statements that write."""
    return frozenset(name for text, name in named().items() if commits(text))


VERBS: Final = frozenset(
    {"delete", "get", "head", "options", "patch", "post", "put", "request", "ws_connect"}
)


def sending() -> frozenset[str]:
    """The functions that send a request over an HTTP session."""
    return frozenset(name for module in modules() for name in sending_in(module))


def sending_in(module: str) -> Iterator[str]:
    file = importlib.import_module(module).__file__
    assert file is not None, f"{module} is a file"
    yield from senders(ast.parse(Path(file).read_text(encoding="utf-8")), module)


def senders(node: ast.AST, name: str) -> Iterator[str]:
    """Of the functions in `node`, which is called `name`, those that send themselves."""
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from senders(child, f"{name}.{child.name}" if inside else name)
        match child:
            case ast.Call(func=ast.Attribute(value=value, attr=verb)) if verb in VERBS:
                if "session" in ast.unparse(value):
                    yield name
            case _:
                pass
