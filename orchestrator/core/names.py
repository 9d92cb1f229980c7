"""What may name something in a path, on the wire and in a table."""

from __future__ import annotations

from contracts.errors import shown
from contracts.limits import NAME_BYTES_MAX
from orchestrator.core.errors import UsageError


def is_name(text: str, bytes_max: int = NAME_BYTES_MAX) -> bool:
    """Whether `text` can name something on the wire and in a table: printable, not empty, not too long."""
    return 0 < len(text.encode("utf-8", "replace")) <= bytes_max and text.isprintable()


def named(name: str, what: str = "name") -> str:
    """`name`, as a path and a journal can hold it. Raises UsageError when it is too long or not printable."""
    if not isinstance(name, str) or not is_name(name):  # pyright: ignore[reportUnnecessaryIsInstance]  # authors need not use types
        raise UsageError(f"{what} {shown(name)}: expected 1 to {NAME_BYTES_MAX} bytes of printable text")
    return name
