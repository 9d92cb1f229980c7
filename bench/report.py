"""What was measured, for programs (results.json) and for people (RESULTS.md and the terminal)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Bar:
    """How many times the figure of `peer` ours must be."""

    peer: str
    at_least: float


@dataclass(frozen=True, slots=True)
class Result:
    """One bench: our figure, what it is of each peer's, and the rows that it comes from."""

    name: str
    unit: str
    value: float
    versus: Mapping[str, float]
    bars: Sequence[Bar]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def missed(self) -> list[str]:
        """Each bar that was not reached, in words."""
        return [
            f"{self.name}: {self.versus[bar.peer]:.1f} times {bar.peer}, expected at least {bar.at_least:g}"
            for bar in self.bars
            if self.versus[bar.peer] < bar.at_least
        ]


def write(results: Sequence[Result], *, setting: str) -> None:
    """Write both files. `setting` says on what machine and server the figures were taken."""
    listed = [
        {
            "name": result.name,
            "unit": result.unit,
            "value": round(result.value, 1),
            "versus": {peer: round(ratio, 2) for peer, ratio in result.versus.items()},
        }
        for result in results
    ]
    (HERE / "results.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(page(results, setting=setting), encoding="utf-8")


def page(results: Sequence[Result], *, setting: str) -> str:
    """All results as Markdown."""
    parts = ["# Benchmarks", "", "Made by `make bench`.", "", setting]
    for result in results:
        versus = ", ".join(f"**{ratio:.1f} times** {peer}" for peer, ratio in result.versus.items())
        parts += ["", f"## {result.name}", "", f"**{result.value:,.0f} {result.unit}**: {versus}.", ""]
        parts += table(result.headings, result.rows)
        parts += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(parts) + "\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table that reads well unrendered: the first column to the left, figures to the right."""
    widths = [max(len(line[n]) for line in (headings, *rows)) for n in range(len(headings))]
    rule = ["-" * width if n == 0 else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
    return [line(headings, widths), "| " + " | ".join(rule) + " |", *(line(row, widths) for row in rows)]


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "| " + " | ".join(padded) + " |"
