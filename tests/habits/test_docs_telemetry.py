"""docs/telemetry.md has a heading for every metric and a row for every span, and tells labels and buckets."""

from __future__ import annotations

import re
from typing import Final

import pytest

from contracts.spans import NAMES
from orchestrator.telemetry import instruments
from orchestrator.telemetry.instruments import Instrument
from tests.habits.documents import code_in, table, text_of

PAGE: Final = "docs/telemetry.md"
SECTIONS: Final = dict(
    re.findall(
        r"^### `(\S+)`\n\n(.*?)(?=^##|\Z)",
        text_of(PAGE).partition("## Metrics")[2].partition("## Traces")[0],
        re.MULTILINE | re.DOTALL,
    )
)


def test_every_metric_has_its_heading_and_every_heading_its_metric() -> None:
    assert list(SECTIONS) == [one.prometheus for one in instruments.ALL]


@pytest.mark.parametrize("one", instruments.ALL, ids=lambda one: one.name)
def test_the_labels_and_the_buckets_of_a_metric_are_told(one: Instrument) -> None:
    text = SECTIONS[one.prometheus].replace("\n", " ")
    labels = re.sub(r"\([^)]*\)", "", text.partition("Labels: ")[2].partition(". ")[0])
    buckets = text.partition("Buckets: ")[2].rstrip(". ")

    assert tuple(code_in(labels)) == one.labels
    assert buckets == ", ".join(f"{bound:g}" if bound < 1000 else str(bound) for bound in one.buckets)


def test_every_span_has_its_row_and_every_row_its_span() -> None:
    listed = [code_in(cells[0])[0].partition(" ")[0] for cells in table(PAGE, "span")]

    assert listed == list(NAMES)
