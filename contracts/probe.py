"""What a probe says about something of which nobody knows whether it was done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

from pydantic import Field

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Done(Generic[R]):
    """It was done, and this is what it would have returned: it is not done again."""

    reply: R
    found: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class NotDone:
    """It was not done, and what was begun cannot do it any more: it may be done again."""

    found: Literal["not_done"] = "not_done"


@dataclass(frozen=True, slots=True)
class CannotSay:
    """It cannot be known yet: the probe is asked again later."""

    found: Literal["cannot_say"] = "cannot_say"


Finding: TypeAlias = Annotated[Done[R] | NotDone | CannotSay, Field(discriminator="found")]
"""What a probe returns; of a command, the reply of its probe: `class WasCharged(Command[Finding[Charged]], …)`."""
