"""Names that can be made again: the same execution, epoch and path give the same key and the same message id.

So a turn that is decided twice, because its commit was lost with the answer unknown, asks for the same thing
and not for a second one.

Source: RFC 9562, section 5.7 (UUID version 7: 48 bits of milliseconds, then chance; here: then a hash).
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def execution_key(execution: UUID | str, epoch: int, path: str) -> str:
    """The idempotency key of one business action: `<execution>/<epoch>/<path>`."""
    return f"{execution}/{epoch}/{path}"


def message_id(execution: UUID | str, epoch: int, path: str, *, at: datetime) -> UUID:
    """The id of the message that `path` sends, `at` being the time that its `asked` fact records."""
    return uuid7(at=at, chance=hashlib.sha256(execution_key(execution, epoch, path).encode()).digest())


def child_id(execution: UUID | str, epoch: int, path: str) -> UUID:
    """The id of the execution that `path` begins: the same each time that it is decided."""
    return uuid8(f"child/{execution_key(execution, epoch, path)}")


def keyed_id(flow: str, key: str) -> UUID:
    """The id of the execution that flows begin for a business key of `flow`: the same whoever begins it."""
    return uuid8(f"start/{len(flow)}/{flow}/{key}")


def uuid8(name: str) -> UUID:
    """A version 8 UUID of a hash of `name`, as `waypost.id_of` makes it."""
    text = hashlib.sha256(name.encode()).hexdigest()
    return UUID(f"{text[:12]}8{text[13:16]}8{text[17:32]}")


def uuid7(*, at: datetime, chance: bytes) -> UUID:
    """A version 7 UUID of the millisecond `at` and the first 10 bytes of `chance`.

    Raises ValueError when `at` has no time zone or does not fit, or `chance` is shorter.
    """
    if at.tzinfo is None:
        raise ValueError(f"expected a time with a zone, found {at.isoformat()}")
    if len(chance) < 10:
        raise ValueError(f"expected 10 bytes of chance, found {len(chance)}")
    milliseconds = (at - EPOCH) // timedelta(milliseconds=1)
    if not 0 <= milliseconds < 1 << 48:
        raise ValueError(f"expected a time after 1970, found {at.isoformat()}")
    rest = int.from_bytes(chance[:10], "big")
    high = milliseconds << 16 | 0x7000 | rest >> 68
    low = 1 << 63 | rest & ((1 << 62) - 1)
    return UUID(int=high << 64 | low)
