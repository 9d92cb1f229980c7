"""Asking a person: a program on the author's own context, under one named scope.

    expense/request             what is asked, and of whom; written down
    expense/decision            the wait for the decision, until the approval expires

With `remind=`, the wait is at `expense/first.0/decision`, and beside it are the pauses before reminders, at
`expense/first.1/remind`, and what is written down after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from contracts.errors import shown
from contracts.limits import CHOICES_MAX, DECIDERS_MAX, REMINDERS_MAX, SPAN_MAX
from contracts.messages import plain
from contracts.sensitive import redacted, value_places
from orchestrator.core.ask import Ask, since
from orchestrator.core.branch import suspend
from orchestrator.core.errors import UsageError
from orchestrator.core.names import named

if TYPE_CHECKING:
    from orchestrator.core.context import Context
    from orchestrator.core.machine import Machine

Json = Any


@dataclass(frozen=True, slots=True)
class Decision:
    """What a person decided: one of the choices, by whom and why; `at` is when the flow was told."""

    choice: str
    by: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Approval:
    """What is asked about `subject`, of `who`. `remind` is the pause before each reminder."""

    subject: str
    who: tuple[str, ...]
    choices: tuple[str, ...]
    remind: timedelta | None
    expires: timedelta | None

    async def ask(self, ctx: Context, machine: Machine, show: Json) -> Decision:
        """Raises TimedOut when nobody has decided in time."""
        async with ctx.saga(self.subject):
            said = {"subject": self.subject, "who": list(self.who), "choices": list(self.choices)}
            request = machine.note(
                "approval", "request", said | {"show": redacted(plain(show), value_places(show))}
            ).path
            if self.remind is None:
                return await self._decided(machine, said, request)
            reminds = self._reminds(machine, self.remind, request)
            return await ctx.first(self._decided(machine, said, request), reminds)

    async def _decided(self, machine: Machine, said: dict[str, Json], request: str) -> Decision:
        ask = Ask("decision", "decision", said | {"request": request}, timeout=self.expires)
        value: dict[str, str] = await suspend(ask)
        return Decision(value["choice"], value["by"], value["reason"], machine.at.astimezone(UTC))

    async def _reminds(self, machine: Machine, pause: timedelta, request: str) -> Decision:
        """Never ends: it is stopped by the decision, or by the end of the wait for it."""
        number = 0
        while True:
            span = pause if number < REMINDERS_MAX else SPAN_MAX
            await suspend(Ask("timer", "remind", {"reminds": self.subject}, timeout=span))
            if number < REMINDERS_MAX:
                number += 1
                machine.note("approval", "reminder", {"request": request, "number": number})


def approval_of(
    subject: str,
    who: str | Sequence[str],
    choices: Sequence[str],
    *,
    remind: timedelta | None,
    expires: timedelta | None,
) -> Approval:
    """Raises UsageError for what nobody could decide, or would never be reminded of."""
    asked = (who,) if isinstance(who, str) else tuple(who)
    about = f"approval {shown(subject)}:"
    named(subject, "approval")
    check_names(about, "who=", asked, most=DECIDERS_MAX)
    if isinstance(choices, str):
        raise UsageError(f"{about} choices= expected several names, found the text {shown(choices)}")
    check_names(about, "choices=", choices, most=CHOICES_MAX)
    since(expires)
    if since(remind) is not None and expires is not None and remind is not None and remind >= expires:
        raise UsageError(
            f"{about} remind= expected less than expires= ({expires}), found {remind}: nobody would be reminded"
        )
    return Approval(subject, asked, tuple(choices), remind, expires)


def check_names(about: str, what: str, names: Sequence[str], *, most: int) -> None:
    """Raises UsageError unless they are one to `most` different names."""
    if not 0 < len(names) <= most or len(set(names)) < len(names):
        raise UsageError(f"{about} {what} expected 1 to {most} different names, found {shown(list(names))}")
    for name in names:
        named(name, f"{about} {what}")
