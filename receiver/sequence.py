"""Where an event stands among those that its sender numbers (CloudEvents, the extension `sequence`); pure.

A sequence is compared as text. One of digits has a predecessor: the number before it, written as long; so it can be
seen that something is missing. Numbers of which it is said that they are numbers (`sequencetype`: `Integer`, a JSON
number, or a number in a webhook that is none) are written as long as each other first. Of any other text no predecessor
is known, so nobody waits for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from contracts.envelope import Envelope
from contracts.errors import MalformedEvent, shown
from receiver.schemes import Ordered

SEQUENCE: Final = "sequence"
SEQUENCE_TYPE: Final = "sequencetype"
SEQUENCE_BYTES_MAX: Final = 256
"""Of one; a longer one is 400."""
WIDTH: Final = 20
"""Digits of what is said to be a number: as many as 64 bits have."""


@dataclass(frozen=True, slots=True)
class Position:
    """`stream` is what is numbered together, `after` the sequence before this one; None where none can be told.

    `gap` is how many seconds it waits for that. With `apart` an event that comes after a greater one is kept apart.
    """

    stream: str
    sequence: str
    after: str | None
    gap: int
    apart: bool

    def is_next(self, last: str | None) -> bool:
        """Whether nothing is missing before it, when `last` is the greatest sequence that was let through."""
        return self.after is None or not self.gap or (last is not None and self.after <= last)

    def is_older(self, last: str | None) -> bool:
        return last is not None and self.sequence < last


def position_of(ordered: Ordered, event: Envelope) -> Position | None:
    """Where `event` stands; None when it says nothing of it. Raises MalformedEvent."""
    said = event.extensions.get(SEQUENCE)
    if said is None:
        return None
    if isinstance(said, bool):
        raise MalformedEvent([f"{SEQUENCE}: expected text, found {shown(said)}"])
    counted = isinstance(said, int) or event.extensions.get(SEQUENCE_TYPE) == "Integer"
    text = written(str(said)) if counted else str(said)
    if not 1 <= len(text.encode("utf-8", "surrogatepass")) <= SEQUENCE_BYTES_MAX:
        raise MalformedEvent(
            [f"{SEQUENCE}: expected 1 to {SEQUENCE_BYTES_MAX} bytes of text, found {shown(text)}"]
        )
    stream = event.source if ordered.of == "source" else f"{event.source} {event.subject or ''}"
    return Position(stream, text, before(text, ordered.first), ordered.gap, ordered.older == "apart")


def written(number: str) -> str:
    """A whole number in such a way that texts are ordered as numbers are. Raises MalformedEvent."""
    if not is_number(number) or len(number.lstrip("0")) > WIDTH:
        raise MalformedEvent(
            [f"{SEQUENCE}: expected a whole number of at most {WIDTH} digits, found {shown(number)}"]
        )
    return number.lstrip("0").rjust(WIDTH, "0")


def before(text: str, first: int) -> str | None:
    """The sequence before `text`; None when it is the first one, or no number."""
    if not is_number(text) or int(text) <= first:
        return None
    return str(int(text) - 1).rjust(len(text), "0")


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
