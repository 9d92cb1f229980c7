"""What a step that runs knows about its try, and what it says while it runs."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge
from contracts.messages import plain
from orchestrator.core.errors import Cancelled, UsageError

Json = Any

LEFT_BYTES_MAX: Final = 4_096
"""Of what one try leaves for the next."""


class Pulse:
    """The life of one try: when it last spoke (monotonic seconds), what it left, and why it is to end.

    `began` is called, from any thread, when the function begins; before that it may wait for a thread.
    """

    __slots__ = ("beat_at", "began", "left", "over")

    def __init__(self, began: Callable[[], object] = lambda: None) -> None:
        self.began = began
        self.beat_at = time.monotonic()
        self.left: Json = None
        self.over = ""

    def begin(self) -> None:
        """The function begins now."""
        self.beat_at = time.monotonic()
        self.began()

    def beat(self) -> None:
        self.beat_at = time.monotonic()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which try this is: the key that stays the same for all of them, its number from 1, when its time is over, and
    what the try before it `left`.
    """

    key: str
    number: int
    deadline: datetime | None
    left: Json = None
    pulse: Pulse = field(default_factory=Pulse, compare=False, repr=False)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for this try any more: its time is over, or its step was given up."""
        return bool(self.pulse.over)

    def heartbeat(self, left: Json = None) -> None:
        """Say that the step lives, from any thread; and leave something for the next try, should there be one.

        Raises Cancelled when nobody waits for this try any more, so that a thread ends too, and UsageError for what
        no journal can keep, or more than 4 KiB.
        """
        if left is not None:
            self.pulse.left = kept(left)
        self.pulse.beat()
        if self.pulse.over:
            raise Cancelled(f"nobody waits for this try any more: {self.pulse.over}")


def kept(left: Json) -> Json:
    """`left` as a journal can keep it. Raises UsageError."""
    data = plain(left)
    try:
        strict_json.encode(data, what="heartbeat", bytes_max=LEFT_BYTES_MAX)
    except (NotEncodable, TooLarge) as error:
        raise UsageError(str(error)) from None
    return data


CURRENT: Final[contextvars.ContextVar[Attempt]] = contextvars.ContextVar("attempt")


def attempt() -> Attempt:
    """The try of the step that runs. Raises UsageError outside of a step."""
    try:
        return CURRENT.get()
    except LookupError:
        raise UsageError("attempt() tells a local step about its try; no step runs here") from None
