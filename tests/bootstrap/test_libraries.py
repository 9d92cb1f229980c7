"""What libraries log and what nobody awaits reaches the log as moments, escaped."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from contracts.log import JsonLines
from orchestrator import libraries
from tests.moments import Moments

HOSTILE = "\x1b[31m\nforged\x07"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    kept, level = logging.root.handlers, logging.root.level
    yield
    logging.root.handlers = kept
    logging.root.setLevel(level)


async def test_a_warning_of_a_library_is_one_line_without_control_characters() -> None:
    lines: list[str] = []
    libraries.hear(JsonLines(lines.append, part="worker", now=lambda: datetime(2027, 1, 1, tzinfo=UTC)))

    logging.getLogger("somebody").warning("careful: %s", HOSTILE)

    [line] = lines
    assert line.rstrip("\n").isprintable()
    assert json.loads(line)["message"] == f"careful: {HOSTILE}"


async def test_a_record_whose_arguments_do_not_fit_is_told_as_it_stands() -> None:
    moments = Moments()
    libraries.hear(moments)

    logging.getLogger("somebody").error("%d %d", "one")  # noqa: PLE1206  # that is the point

    assert moments.all[0][1]["message"] == "%d %d"


async def test_a_failure_that_nobody_awaits_is_told() -> None:
    moments = Moments()
    libraries.hear(moments)

    def fails() -> None:
        raise RuntimeError(HOSTILE)

    asyncio.get_running_loop().call_soon(fails)

    told = await moments.until("task.failed")
    assert isinstance(told["error"], RuntimeError)
