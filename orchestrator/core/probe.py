"""What a probe says about a step of which nobody knows whether it was done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Done(Generic[R]):
    """It was done, and this is what it would have returned: it is not run again."""

    reply: R


@dataclass(frozen=True, slots=True)
class NotDone:
    """It was not done, and what was begun cannot do it any more: it is run again."""


@dataclass(frozen=True, slots=True)
class CannotSay:
    """It cannot be known yet: the probe is asked again later."""


Finding: TypeAlias = Done[R] | NotDone | CannotSay
