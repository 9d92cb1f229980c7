"""Which changes make other code of a flow, and which do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from orchestrator.fingerprint import fingerprint
from orchestrator.flows import Flow
from orchestrator.workflow import Workflow

FLOW = '''
from orchestrator import Context, local, workflow


def total(lines):
    """What it costs."""
    return sum(rounded(line) for line in lines)


def rounded(line):
    return round(line)


def charge(amount):
    return amount


def refund(amount):
    return -amount


def unused():
    return 1


@workflow(name="order", version="1")
async def order(ctx: Context, lines: list) -> int:
    """Charges an order."""
    amount = total(lines)  # in cents
    return await ctx.step(charge, amount, undo=local(refund, amount))
'''


def load(folder: Path, source: str) -> ModuleType:
    path = folder / f"flows_{len(list(folder.iterdir()))}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of(folder: Path, source: str) -> bytes:
    found_there: list[Any] = list(vars(load(folder, source)).values())
    [flow] = [cast("Flow", thing) for thing in found_there if isinstance(thing, Workflow)]
    found = fingerprint(flow.run, flow.mutex)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("amount = total(lines)", "amount = total(lines) + 1"),
        ("return await ctx.step", "await ctx.sleep(1)\n    return await ctx.step"),
        ("return sum(", "return 2 * sum("),
        ("return round(line)", "return int(line)"),
        ("ctx.step(charge", "ctx.step(refund"),
    ],
)
def test_what_the_flow_does_or_what_it_calls_is_its_code(tmp_path: Path, old: str, new: str) -> None:
    assert FLOW.count(old) == 1

    assert of(tmp_path, FLOW) != of(tmp_path, FLOW.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # in cents", ""),
        ('    """Charges an order."""\n', ""),
        ('"""What it costs."""', '"""The sum."""'),
        ("amount = total(lines)", "amount: int = total(\n        lines,\n    )"),
        ("lines: list) -> int", "lines: list[float]) -> float"),
        ('version="1"', 'version="2"'),
        ("async def order(ctx", "async def order_1(ctx"),
        ("def unused():\n    return 1", "def unused():\n    return 2"),
        ("def charge(amount):\n    return amount", "def charge(amount):\n    return amount * 2"),
        ("return -amount", "return 0 - amount"),
    ],
)
def test_words_forms_and_what_steps_run_are_not(tmp_path: Path, old: str, new: str) -> None:
    assert FLOW.count(old) == 1

    assert of(tmp_path, FLOW) == of(tmp_path, FLOW.replace(old, new))


ALONE = FLOW.replace('version="1"', 'version="1", mutex=lambda lines: f"order-{total(lines)}"')


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("order-", "lines-"),
        ("mutex=lambda lines: ", "mutex=lambda _lines: "),
        ('mutex=lambda lines: f"order-{total(lines)}"', "mutex=str"),
        ("return sum(", "return 2 * sum("),
    ],
)
def test_the_key_of_its_mutex_is_its_code(tmp_path: Path, old: str, new: str) -> None:
    assert ALONE.count(old) == 1

    assert of(tmp_path, ALONE) != of(tmp_path, ALONE.replace(old, new))


def test_where_the_key_of_its_mutex_is_written_is_not(tmp_path: Path) -> None:
    below = ALONE.replace("mutex=lambda", "\n    mutex=lambda")

    assert of(tmp_path, below) == of(tmp_path, ALONE)


def test_functions_that_call_each_other_are_read_once(tmp_path: Path) -> None:
    source = FLOW.replace("return round(line)", "return total([line]) if line else 0")

    assert of(tmp_path, source) != of(tmp_path, FLOW)


def test_without_its_source_nothing_is_known_of_a_flow() -> None:
    names: dict[str, object] = {}
    exec("async def order(ctx, given):\n    return given", names)

    assert fingerprint(names["order"]) is None  # pyright: ignore[reportArgumentType]  # it is a function
