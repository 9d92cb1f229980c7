"""Payloads of facts that an earlier release wrote, as this release writes them.

A journal outlives releases, and a fact is never changed. So each payload carries the version in which it was written
(`journal.schema`), and is lifted when it is read. Whoever changes what a payload says raises SCHEMA, puts in one pure
function from the last version to the new one, and leaves the others alone: a fact of any age is lifted step by step.

    SCHEMA = 2
    UPCASTERS = {("ended", 1): lambda data: {**data, "by": "service"}}

What writes facts must say SCHEMA too: `waypost.commit_turns` and the functions that start executions write the column's
default. Journals of each release are kept in tests/golden, and must come to what this release would write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

Json = Any
Upcaster: TypeAlias = Callable[[dict[str, Json]], dict[str, Json]]

SCHEMA: Final = 1
"""The version of the payloads that this release writes."""

UPCASTERS: Final[Mapping[tuple[str, int], Upcaster]] = {}
"""By kind of fact and version: makes of a payload in that version one in the next; none where nothing changed."""


def lifted(
    kind: str,
    schema: int,
    data: dict[str, Json],
    *,
    to: int = SCHEMA,
    upcasters: Mapping[tuple[str, int], Upcaster] = UPCASTERS,
) -> dict[str, Json]:
    """`data` of a fact that was written in the version `schema`, as the version `to` writes it.

    Raises ValueError for a version that a later release wrote.
    """
    if not 1 <= schema <= to:
        raise ValueError(f"expected a payload of version 1 to {to}, found one of version {schema}")
    for version in range(schema, to):
        upcast = upcasters.get((kind, version))
        if upcast is not None:
            data = upcast(data)
    return data
