"""Which code a flow is: a hash of its source and of the source of what it calls in its module.

The function that says the key of its mutex is part of it. It is taken of the syntax tree, so that comments,
docstrings, annotations, other decorators, line breaks and the version of Python make no difference. What a local
step runs is not part of it: its results are recorded, so that a step may be mended under a version that runs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final, cast

RUN_ELSEWHERE: Final = frozenset({"step", "transaction", "local"})
"""What is called with a function that runs outside of the flow: its first argument."""

NO_CODE: Final = frozenset(
    {"annotation", "returns", "decorator_list", "type_comment", "type_params", "ctx", "kind"}
)
"""Parts of a syntax tree that change nothing of what a flow asks."""


MUTEX: Final = "mutex="
"""Stands for the name of the function that says the key of a mutex."""


def fingerprint(run: Callable[..., Any], mutex: Callable[..., Any] | None = None) -> bytes | None:
    """32 bytes that differ when the code of the flow function `run` does, or that of its `mutex`; None where its
    source is not to be had.
    """
    found: dict[str, str] = {}
    flow = inspect.unwrap(run)
    waiting: list[Callable[..., Any]] = [flow]
    if isinstance(mutex, FunctionType):
        tree = tree_of(mutex)
        if tree is None:
            return None
        found[MUTEX] = "".join(written(tree))
        waiting += called(tree, mutex)
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function.__qualname__ in found:
            continue
        tree = tree_of(function)
        if tree is None:
            return None
        if function is flow and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
            tree.name = ""  # a flow has another name than its function, which may be renamed
        found[function.__qualname__] = "".join(written(tree))
        waiting += called(tree, function)
    found[""] = found.pop(flow.__qualname__, "")
    text = "\n".join(f"{name} {code}" for name, code in sorted(found.items()))
    return hashlib.sha256(text.encode()).digest()


def tree_of(function: FunctionType) -> ast.AST | None:
    if function.__name__ == "<lambda>":
        return tree_of_lambda(function)
    try:
        source = textwrap.dedent(inspect.getsource(function))
        [tree] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree


def tree_of_lambda(function: FunctionType) -> ast.AST | None:
    """The lambdas of its line: those of one line cannot be told apart."""
    try:
        lines, _ = inspect.findsource(function)
        module = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    line = function.__code__.co_firstlineno
    found: list[ast.expr] = [
        node for node in ast.walk(module) if isinstance(node, ast.Lambda) and node.lineno == line
    ]
    return ast.Tuple(found, ast.Load()) if found else None


def called(tree: ast.AST, function: FunctionType) -> Iterator[FunctionType]:
    """The functions of the same module that are named in `tree`, but for those that steps run."""
    for name in sorted(names_in(tree)):
        thing = function.__globals__.get(name)
        if isinstance(thing, FunctionType) and thing.__module__ == function.__module__:
            yield thing


def names_in(tree: ast.AST) -> set[str]:
    steps = {id(argument) for call in ast.walk(tree) for argument in run_elsewhere(call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in steps}


def run_elsewhere(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[first, *_]) if (
            name in RUN_ELSEWHERE
        ):
            yield first
        case _:
            return


def written(node: Any) -> Iterator[str]:
    """A syntax tree as text, the same in each version of Python: what is empty is left out."""
    match node:
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from written(ast.Assign([target], value))
        case ast.AST():
            yield f"({type(node).__name__}"
            for name, value in ast.iter_fields(node):
                kept = without_docstring(value) if name == "body" else value
                if name in NO_CODE or kept is None or kept == []:
                    continue
                yield f" {name}="
                yield from written(kept)
            yield ")"
        case list():
            for part in cast("list[Any]", node):
                yield from written(part)
        case _:
            yield repr(node)


def without_docstring(body: Any) -> Any:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
        case _:
            return body
