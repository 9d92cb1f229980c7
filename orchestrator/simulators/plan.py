"""What a simulated provider is to send, as data: events, copies of some, and the order of their first tries.

All chance is drawn here, from a generator that is given, so that one seed makes one plan, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Final
from uuid import UUID

from contracts.errors import ContractViolation, shown
from contracts.limits import EVENT_BYTES_MAX
from orchestrator.simulators import providers
from orchestrator.simulators.providers import Habits

COUNT_MAX: Final = 10_000
"""Events of one run."""
RATE_MAX: Final = 1_000.0
"""Events a second."""
SPEED_MAX: Final = 1_000_000.0
"""How much faster than theirs a provider's clock goes."""
SKEW_SECONDS_MAX: Final = 86_400
"""How far a provider's clock is off, to either side."""
NEAR_MAX: Final = 8
"""How many places an event is moved, or how many a copy comes after it."""
EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""When events say that they happened: the first second of it, and so on."""
TYPE: Final = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
PLACEHOLDER: Final = re.compile(r"\$\{(\w*)\}")


class PlanInvalid(ContractViolation):
    """What a simulated provider is asked to send; the text names the option."""

    code = "plan-invalid"
    http_status = 422


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`count` events, `rate` a second; a part of them, `duplicates`, twice; with `reorder` in another order.

    `speed` is how much faster than its own the provider's retry clock goes, `skew` how many seconds its clock is ahead.
    `type` and `body`, a template, are instead of what it has of its own. Raises PlanInvalid.
    """

    count: int = 1
    rate: float = 100.0
    duplicates: float = 0.0
    reorder: bool = False
    speed: float = 1.0
    skew: int = 0
    type: str = ""
    body: str = ""

    def __post_init__(self) -> None:
        size = len(self.body.encode())
        for name, fits, expected, found in (
            ("count", 1 <= self.count <= COUNT_MAX, f"1 to {COUNT_MAX}", self.count),
            ("rate", 0 < self.rate <= RATE_MAX, f"more than 0, at most {RATE_MAX:.0f} a second", self.rate),
            ("duplicates", 0 <= self.duplicates <= 1, "0 to 1", self.duplicates),
            ("speed", 0 < self.speed <= SPEED_MAX, f"more than 0, at most {SPEED_MAX:.0f}", self.speed),
            ("skew", abs(self.skew) <= SKEW_SECONDS_MAX, f"at most {SKEW_SECONDS_MAX} seconds", self.skew),
            (
                "type",
                not self.type or TYPE.fullmatch(self.type),
                "at most 128 letters, digits and ._/:-",
                self.type,
            ),
            ("body", size <= EVENT_BYTES_MAX, f"at most {EVENT_BYTES_MAX} bytes", size),
        ):
            if not fits:
                raise PlanInvalid(f"{name}: expected {expected}, found {shown(found)}")


@dataclass(slots=True)
class Delivery:
    """An event on its way, or a copy of one that was sent before. `last` is the last answer: a status, or what happened
    instead; `age` how many seconds of the provider's clock ago it was first sent. Its body is made of `template` and
    `values` when it is asked for, since all of a run would not fit into memory.
    """

    id: str
    number: int
    template: str = field(repr=False)
    values: Mapping[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    is_copy: bool = False
    tries: int = 0
    age: float = 0.0
    last: str = ""
    accepted: bool = False

    @property
    def body(self) -> bytes:
        """Raises PlanInvalid for a name that there is not in the template."""
        return filled(self.template, self.values).encode()


def deliveries(habits: Habits, plan: Plan, chance: Random, *, first: int = 1) -> list[Delivery]:
    """What is to be sent, in its order; the events are numbered from `first`. Raises PlanInvalid."""
    made: list[tuple[float, Delivery]] = []
    for number in range(first, first + plan.count):
        event = of_event(habits, plan, number, new_id(habits.prefix, chance))
        place = number + (chance.uniform(0, NEAR_MAX) if plan.reorder else 0.0)
        made.append((place, event))
        if chance.random() < plan.duplicates:
            copy = replace(event, is_copy=True)
            made.append((place + chance.uniform(0, NEAR_MAX), copy))
    filled(plan.body or habits.body, made[0][1].values)  # what cannot be is told before anything is sent
    return [delivery for _, delivery in sorted(made, key=lambda pair: pair[0])]


def of_event(habits: Habits, plan: Plan, number: int, identity: str) -> Delivery:
    happened = EPOCH + timedelta(seconds=number)
    values = {
        "id": identity,
        "number": str(number),
        "type": plan.type or habits.type,
        "time": happened.isoformat().replace("+00:00", "Z"),
        "timestamp": str(int(happened.timestamp())),
    }
    headers = {name: filled(text, values) for name, text in habits.headers.items()}
    template = plan.body or habits.body
    return Delivery(identity, number, template, values, {"content-type": habits.content_type, **headers})


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with values where it says `${name}`. Raises PlanInvalid for a name that there is not."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            known = ", ".join(f"${{{name}}}" for name in values)
            raise PlanInvalid(f"body: expected {known}, found {shown(found[0])}")
        return values[found[1]]

    return PLACEHOLDER.sub(value, template)


def new_id(prefix: str, chance: Random) -> str:
    drawn = chance.getrandbits(128)
    return str(UUID(int=drawn, version=4)) if prefix == providers.UUID else f"{prefix}{drawn:032x}"
