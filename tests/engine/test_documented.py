"""The examples of docs/flows.md that need nothing but a worker, with a worker."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from orchestrator.client import Client
from orchestrator.flows import Flows
from tests.engine.conftest import Working
from tests.habits.documents import files_in

EXAMPLES: Final[dict[str, tuple[str, Any, Any]]] = {
    "step": ("settle_batch", {"id": "b1", "pages": 3}, "printed b1"),
}
"""By its file: the flow, an input, and what it returns."""


@pytest.fixture(autouse=True)
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import shop.…` finds the page's files."""
    for name, text in files_in("docs/flows.md").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_runs_as_its_page_says(name: str, working: Working, client: Client) -> None:
    flow, argument, output = EXAMPLES[name]
    found = getattr(importlib.import_module(f"shop.{name}"), flow)

    async with working(flows=Flows([found])):
        started = await client.start(found, argument)
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", output)
