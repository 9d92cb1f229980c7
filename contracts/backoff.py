"""When to try again what outlives a process: tables, not formulas, so that people can compare them.

Source: Standard Webhooks 1.0.0, "Deliverability and reliability" (the schedule of events).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, cast

DELAYS_MAX: Final = 50  # delays of one list
DELAY_SECONDS_MAX: Final = 7 * 86_400.0  # seconds between two attempts
ATTEMPTS_MAX: Final = 1_000  # of one message, if its schedule says how many


class BadSchedule(ValueError):
    """What should be a schedule is none; the text names the part, what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds after the first, second, … attempt. After the last of them each is `factor` times the one before, at
    most `cap` seconds.

    It ends after `attempts` attempts, and when the next one would come more than `age` seconds after the message was
    made; without them it goes on until the message expires. Each delay varies by `jitter`, a part of it, to either
    side.
    """

    delays: tuple[float, ...]
    factor: float = 1.0
    cap: float = DELAY_SECONDS_MAX
    attempts: int | None = None
    age: float | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Raises BadSchedule."""
        for name, fits, expected in (
            ("delays", 1 <= len(self.delays) <= DELAYS_MAX, f"1 to {DELAYS_MAX} delays"),
            (
                "delays",
                all(0 <= d <= DELAY_SECONDS_MAX for d in self.delays),
                f"0 to {DELAY_SECONDS_MAX:.0f} seconds each",
            ),
            ("factor", 1 <= self.factor <= 100, "1 to 100"),
            (
                "cap",
                0 < self.cap <= DELAY_SECONDS_MAX,
                f"more than 0, at most {DELAY_SECONDS_MAX:.0f} seconds",
            ),
            ("attempts", self.attempts is None or 1 <= self.attempts <= ATTEMPTS_MAX, f"1 to {ATTEMPTS_MAX}"),
            ("age", self.age is None or self.age > 0, "more than 0 seconds"),
            ("jitter", 0 <= self.jitter <= 1, "0 to 1"),
        ):
            if not fits:
                raise BadSchedule(f"{name}: expected {expected}, found {getattr(self, name)}")

    def after(self, attempt: int, *, age: timedelta = timedelta(0), chance: float = 0.5) -> timedelta | None:
        """How long to wait after the `attempt`-th attempt, counted from 1, has failed; None when it was the last.

        `age` is how old the message is, and `chance` (0 to 1) where in its jitter the delay lies.
        """
        if attempt < 1:
            raise ValueError(f"expected an attempt counted from 1, found {attempt}")
        if self.attempts is not None and attempt >= self.attempts:
            return None
        delay = self._delay(attempt) * (1 + self.jitter * (2 * chance - 1))
        if self.age is not None and age.total_seconds() + delay > self.age:
            return None
        return timedelta(seconds=delay)

    def _delay(self, attempt: int) -> float:
        if attempt <= len(self.delays):
            return self.delays[attempt - 1]
        last = self.delays[-1]
        if self.factor == 1 or last == 0:
            return last
        more = min(attempt - len(self.delays), 1_000)  # the cap is reached long before
        return min(last * self.factor**more, self.cap) if more < 300 else self.cap

    def __str__(self) -> str:
        """In words that people read: `1s 2s 5s 10s 30s 1m`, and what else it says."""
        parts = [" ".join(_word(delay) for delay in self.delays)]
        if self.factor != 1:
            parts.append(f"then {self.factor:g} times as long, at most {_word(self.cap)}")
        if self.attempts is not None:
            parts.append(f"{self.attempts} attempts")
        if self.age is not None:
            parts.append(f"for {_word(self.age)}")
        if self.jitter:
            parts.append(f"give or take {self.jitter:.0%}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """What differs from a schedule that says nothing but its delays."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"delays": list(self.delays)} | {
            name: value for name, value in found.items() if name != "delays" and value != _DEFAULTS[name]
        }

    @classmethod
    def of(cls, value: object) -> Schedule:
        """Reads what `as_json` writes. Raises BadSchedule."""
        if not isinstance(value, Mapping):
            raise BadSchedule("schedule: expected an object")
        found = cast("Mapping[str, Any]", value)
        delays = found.get("delays")
        if not isinstance(delays, list) or not set(found) <= {"delays", *_DEFAULTS}:
            raise BadSchedule(f"schedule: expected delays, and of {', '.join(_DEFAULTS)} what differs")
        numbers = [*cast("list[Any]", delays), *(found[name] for name in found if name != "delays")]
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise BadSchedule("schedule: expected numbers")
        options: dict[str, Any] = {name: found[name] for name in found if name != "delays"}
        return cls(tuple(float(d) for d in cast("list[Any]", delays)), **options)


def _word(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s"


_DEFAULTS: Final[Mapping[str, Any]] = {
    "factor": 1.0,
    "cap": DELAY_SECONDS_MAX,
    "attempts": None,
    "age": None,
    "jitter": 0.0,
}

COMMAND_SCHEDULE: Final = Schedule(delays=(1, 2, 5, 10, 30, 60))
"""Somebody waits for a command, so it is tried often, until its deadline: 1, 2, 5, 10, 30 s, then each minute."""

EVENT_SCHEDULE: Final = Schedule(
    delays=(5, 5 * 60, 30 * 60, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400), attempts=10, jitter=0.2
)
"""Nobody waits for an event, so it is tried for long: 5 s, 5 and 30 min, 2, 5, 10, 14, 20, 24 h; ten attempts."""
