"""How much of one sender a receiver takes: so many requests a second, so many at once. Each process counts its own.

Only what is authentic counts, so nobody can use up what belongs to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from contracts.limits import SENDERS_KEPT_MAX
from receiver.senders import Sender

Of = tuple[int, str]
FREE: Final = nullcontext()
"""For those of whom nothing is counted."""


class TooMany(Exception):
    """The sender is to come again after `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests; again in {seconds} s")
        self.seconds = seconds


@dataclass(slots=True)
class Bucket:
    """Tokens that are left, as of a moment in monotonic seconds, and requests at work."""

    tokens: float
    at: float
    working: int = 0


class Rates:
    """A token bucket for each sender whose settings name a rate, and a count of its requests at work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[Of, Bucket] = {}

    def taking(self, sender: Sender) -> AbstractContextManager[None]:
        """Within it, a request of `sender` is at work. Raises TooMany instead."""
        policy = sender.policy
        return FREE if policy.rate is None and policy.concurrency is None else self._taking(sender)

    @contextmanager
    def _taking(self, sender: Sender) -> Generator[None]:
        policy, bucket = sender.policy, self._of(sender)
        if policy.concurrency is not None and bucket.working >= policy.concurrency:
            raise TooMany(1)
        if policy.rate is not None:
            now = self._clock()
            burst = policy.burst or max(math.ceil(policy.rate), 1)
            bucket.tokens = min(burst, bucket.tokens + (now - bucket.at) * policy.rate)
            bucket.at = now
            if bucket.tokens < 1:
                raise TooMany(max(math.ceil((1 - bucket.tokens) / policy.rate), 1))
            bucket.tokens -= 1
        bucket.working += 1
        try:
            yield
        finally:
            bucket.working -= 1

    def _of(self, sender: Sender) -> Bucket:
        key = sender.tenant_id, sender.name
        if key not in self._buckets and len(self._buckets) >= SENDERS_KEPT_MAX:
            self._buckets = {it: bucket for it, bucket in self._buckets.items() if bucket.working}
        return self._buckets.setdefault(key, Bucket(math.inf, self._clock()))
