"""What was measured, for programs (results.json) and for people (RESULTS.md and the terminal)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must be: `found` `what`, at least `least` or at most `most` of it."""

    what: str
    found: float
    least: float | None = None
    most: float | None = None

    @property
    def is_met(self) -> bool:
        """A figure that is no number meets nothing."""
        return (self.least is None or self.found >= self.least) and (
            self.most is None or self.found <= self.most
        )

    def __str__(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return f"{figure(self.found)} {self.what}, expected {bound}: {'met' if self.is_met else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Result:
    """One bench: its figure, what that is of each peer's, all other `figures`, and the rows that they come from."""

    name: str
    unit: str
    value: float
    bars: Sequence[Bar]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    versus: Mapping[str, float] = field(default_factory=dict[str, float])
    figures: Mapping[str, float] = field(default_factory=dict[str, float])

    def missed(self) -> list[str]:
        """Each bar that was not reached, in words."""
        return [f"{self.name}: {bar}" for bar in self.bars if not bar.is_met]

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "unit": self.unit,
            "value": round(self.value, 2),
            "versus": {peer: round(ratio, 2) for peer, ratio in self.versus.items()},
            "figures": {name: round(value, 2) for name, value in self.figures.items()},
            "bars": [
                {
                    "what": bar.what,
                    "found": round(bar.found, 2),
                    "least": bar.least,
                    "most": bar.most,
                    "met": bar.is_met,
                }
                for bar in self.bars
            ],
        }
        return {name: value for name, value in found.items() if value not in ({}, [])}


@dataclass(frozen=True, slots=True)
class Taken:
    """A result, and the load average of the machine (over one minute) before and after it was taken."""

    result: Result
    load_before: float
    load_after: float


def write(taken: Sequence[Taken], *, setting: str) -> None:
    """Write both files. `setting` says on what machine and server the figures were taken."""
    listed = [
        {**one.result.as_json(), "load": [round(one.load_before, 2), round(one.load_after, 2)]}
        for one in taken
    ]
    (HERE / "results.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(page(taken, setting=setting), encoding="utf-8")


def page(taken: Sequence[Taken], *, setting: str) -> str:
    """All results as Markdown."""
    parts = ["# Benchmarks", "", "Made by `make bench`.", "", setting]
    for one in taken:
        result = one.result
        parts += ["", f"## {result.name}", "", f"**{figure(result.value)} {result.unit}**", ""]
        parts += [f"- {bar}" for bar in result.bars] + ([""] if result.bars else [])
        parts += table(result.headings, result.rows)
        load = f"Load average of the machine: {one.load_before:.2f} before it, {one.load_after:.2f} after it."
        parts += ["", *(f"- {note}" for note in (*result.notes, load))]
    return "\n".join(parts) + "\n"


def figure(value: float) -> str:
    """A figure with as many places as are worth reading: 4,401, 38.2, 1.04."""
    places = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{places}f}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table that reads well unrendered: the first column to the left, figures to the right."""
    widths = [max(len(line[n]) for line in (headings, *rows)) for n in range(len(headings))]
    rule = ["-" * width if n == 0 else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
    return [line(headings, widths), "| " + " | ".join(rule) + " |", *(line(row, widths) for row in rows)]


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "| " + " | ".join(padded) + " |"
