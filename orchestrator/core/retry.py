"""When something is tried again, and after which errors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias, TypedDict, Unpack, cast

from contracts.limits import SPAN_MAX

CAP: Final = timedelta(minutes=5)

SHORTEST: Final = timedelta(milliseconds=1)
"""Between two tries: a message is named by the millisecond in which it was asked for."""

Which: TypeAlias = type[Exception] | str
"""Errors of a class, or with a code."""


class Bounds(TypedDict, total=False):
    """What every policy has beside the shape of its waits: the fields of Retry by these names."""

    attempts: int | None
    cap: timedelta
    jitter: float
    within: timedelta | None
    only: tuple[Which, ...]
    never: tuple[Which, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """`attempts` tries in all; before try n + 1 it waits min(cap, first · factor^(n-1) + step · (n-1)), less up to
    the part `jitter` of that. What it waits less is a keyed hash of where the step stands, so a replay waits the same.

    `within`: no try begins later than so long after the first was asked for. `attempts` may be None then: as many as
    fit. `only` these errors are tried again (empty: all), and `never` those: classes of exceptions with all below
    them, or codes.

    Raises ValueError for a policy that cannot be.
    """

    attempts: int | None = 5
    first: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    cap: timedelta = CAP
    step: timedelta = timedelta(0)
    jitter: float = 0.2
    within: timedelta | None = None
    only: tuple[Which, ...] = ()
    never: tuple[Which, ...] = ()

    def __post_init__(self) -> None:
        if self.attempts is None and self.within is None:
            raise ValueError(f"{self}: expected within= where attempts are not counted")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"Retry(attempts={self.attempts}): at least one attempt")
        if not timedelta(0) < self.first <= self.cap <= SPAN_MAX:
            raise ValueError(f"{self}: expected 0 < first <= cap, at most ten years")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"{self}: expected a factor of at least 1")
        if self.step < timedelta(0) or (self.step and self.factor != 1):
            raise ValueError(f"{self}: expected a step of at least 0, and a factor of 1 beside one")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"{self}: expected a jitter from 0 to 1")
        if self.within is not None and not timedelta(0) < self.within <= SPAN_MAX:
            raise ValueError(f"{self}: expected within= of more than 0 and at most ten years")
        for field, named in (("only", self.only), ("never", self.never)):
            check_which(field, named)

    @classmethod
    def fixed(cls, every: timedelta, **bounds: Unpack[Bounds]) -> Retry:
        """The same wait each time."""
        bounds.setdefault("cap", every)
        return cls(first=every, factor=1.0, **bounds)

    @classmethod
    def linear(cls, first: timedelta, step: timedelta | None = None, **bounds: Unpack[Bounds]) -> Retry:
        """`step` longer each time (as long as the first wait, unless given), up to `cap`."""
        bounds.setdefault("cap", max(first, CAP))
        return cls(first=first, factor=1.0, step=first if step is None else step, **bounds)

    @classmethod
    def exponential(cls, first: timedelta, factor: float = 2.0, **bounds: Unpack[Bounds]) -> Retry:
        """`factor` times as long each time, up to `cap`."""
        bounds.setdefault("cap", max(first, CAP))
        return cls(first=first, factor=factor, **bounds)

    def as_data(self) -> dict[str, float | int | list[str] | None]:
        """The policy as a journal keeps it, spans in seconds. One that names classes has no such form."""
        return {
            "attempts": self.attempts,
            "first": self.first.total_seconds(),
            "factor": self.factor,
            "cap": self.cap.total_seconds(),
            "step": self.step.total_seconds(),
            "jitter": self.jitter,
            "within": None if self.within is None else self.within.total_seconds(),
            "only": [str(one) for one in self.only],
            "never": [str(one) for one in self.never],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Retry:
        """What `as_data` said."""
        within = data["within"]
        return cls(
            attempts=data["attempts"],
            first=timedelta(seconds=data["first"]),
            factor=float(data["factor"]),
            cap=timedelta(seconds=data["cap"]),
            step=timedelta(seconds=data["step"]),
            jitter=float(data["jitter"]),
            within=None if within is None else timedelta(seconds=within),
            only=tuple(data["only"]),
            never=tuple(data["never"]),
        )

    def delay_after(self, attempt: int, *, key: bytes) -> timedelta | None:
        """The wait after the `attempt`-th try (from 1) failed; None when there is no further try."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        cap = self.cap.total_seconds()
        try:
            grown = self.first.total_seconds() * float(self.factor) ** (attempt - 1)
            whole = min(cap, grown + self.step.total_seconds() * (attempt - 1))
        except OverflowError:
            whole = cap
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) / 2**32
        return max(SHORTEST, timedelta(seconds=round(whole * (1 - self.jitter * draw), 6)))

    def next_at(self, attempt: int, *, key: bytes, asked_at: datetime, now: datetime) -> datetime | None:
        """When the try after the `attempt`-th begins, which failed `now`; None when there is none."""
        delay = self.delay_after(attempt, key=key)
        if delay is None or (self.within is not None and now + delay > asked_at + self.within):
            return None
        return now + delay

    def has_try(self, attempt: int, *, asked_at: datetime, now: datetime) -> bool:
        """Whether the `attempt`-th try may still begin, `now`."""
        counted = self.attempts is None or attempt <= self.attempts
        return counted and (self.within is None or now <= asked_at + self.within)

    def covers(self, code: str, error: BaseException | None = None) -> bool:
        """Whether what failed so is tried again at all."""
        if not (self.only or self.never):
            return True
        return not any(_is(code, error, one) for one in self.never) and (
            not self.only or any(_is(code, error, one) for one in self.only)
        )


def _is(code: str, error: BaseException | None, which: Which) -> bool:
    return code == which if isinstance(which, str) else isinstance(error, which)


def check_which(field: str, which: Sequence[object]) -> None:
    """Raises ValueError for what names no errors."""
    if isinstance(which, str) or not isinstance(cast("object", which), tuple):
        raise ValueError(f"Retry({field}={which!r}): expected a tuple of exception classes and codes")  # noqa: TRY004  # as for every other field
    for one in which:
        if not (one if isinstance(one, str) else isinstance(one, type) and issubclass(one, Exception)):
            raise ValueError(f"Retry({field}=): expected exception classes and codes, found {one!r}")


STEP_RETRY = Retry()
"""A local step: 5 tries, 1 s, doubling, at most 5 minutes."""

UNDO_RETRY = Retry(attempts=20, cap=timedelta(hours=1))
"""A local undo: 20 tries, at most an hour apart. When they are used up, the execution is held."""

PROBE_RETRY = Retry(attempts=300, within=timedelta(days=1))
"""A probe of a command that cannot say: as often as fits into its day, at most 5 minutes apart."""

ONCE = Retry(attempts=1)
