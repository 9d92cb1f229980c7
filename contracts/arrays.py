"""Columns of a batch as PostgreSQL array literals.

One statement carries a whole batch as parallel arrays. Written by hand, because a driver that adapts each
element alone costs more than the statement.

Source: PostgreSQL documentation, 8.15.2 and 8.15.6, array input and output syntax.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta


def plain(values: Iterable[object]) -> str:
    """Numbers, UUIDs and words without commas, quotes, braces, backslashes or spaces; None becomes null."""
    return "{" + ",".join(["null" if value is None else str(value) for value in values]) + "}"


def numbers(values: Iterable[int]) -> str:
    """Numbers, none of them null."""
    return "{" + ",".join(map(str, values)) + "}"


def words(values: Iterable[str]) -> str:
    """Words as in `plain`, none of them null."""
    return "{" + ",".join(values) + "}"


def texts(values: Iterable[str | None]) -> str:
    """Any text; None becomes null."""
    return (
        "{"
        + ",".join(
            [
                "null" if value is None else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
                for value in values
            ]
        )
        + "}"
    )


def times(values: Iterable[datetime | None]) -> str:
    """Facts of one turn mostly share their time, so each is written out once."""
    texts: list[str] = []
    last: datetime | None = None
    text = "null"
    for value in values:
        if value is not last:
            last, text = value, "null" if value is None else f'"{value.isoformat()}"'
        texts.append(text)
    return "{" + ",".join(texts) + "}"


def spans(values: Iterable[timedelta | None]) -> str:
    return "{" + ",".join(["null" if v is None else f'"{v.total_seconds():f} s"' for v in values]) + "}"


def flags(values: Iterable[bool]) -> str:
    return "{" + ",".join(["t" if value else "f" for value in values]) + "}"


def blobs(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["null" if value is None else f'"\\\\x{value.hex()}"' for value in values]) + "}"
