"""When a local step is tried again."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from datetime import timedelta

from contracts.limits import SPAN_MAX


@dataclass(frozen=True, slots=True)
class Retry:
    """`attempts` tries in all; before try n + 1 it waits min(cap, first · factor^(n-1)), less up to a fifth.

    What it waits less is a keyed hash of where the step stands, so a replay waits the same.
    """

    attempts: int = 5
    first: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    cap: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"Retry(attempts={self.attempts}): at least one attempt")
        if not timedelta(0) < self.first <= self.cap <= SPAN_MAX:
            raise ValueError(f"{self}: expected 0 < first <= cap, at most ten years")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"{self}: expected a factor of at least 1")

    def delay_after(self, attempt: int, *, key: bytes) -> timedelta | None:
        """The wait after the `attempt`-th try (from 1) failed; None when there is no further try."""
        if attempt >= self.attempts:
            return None
        cap = self.cap.total_seconds()
        try:
            whole = min(cap, self.first.total_seconds() * float(self.factor) ** (attempt - 1))
        except OverflowError:
            whole = cap
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) / 2**32
        return timedelta(seconds=round(whole * (1 - 0.2 * draw), 6))


STEP_RETRY = Retry()
"""A local step: 5 tries, 1 s, doubling, at most 5 minutes."""

UNDO_RETRY = Retry(attempts=20, cap=timedelta(hours=1))
"""A local undo: 20 tries, at most an hour apart. When they are used up, the execution is held."""

ONCE = Retry(attempts=1)
