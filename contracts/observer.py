"""The one door through which the parts say what happened: logs, metrics, traces and tests listen there.

A moment is a fixed name in the past tense, its fields are facts (ids, counts, reasons) and never payloads,
secrets or text that a stranger wrote unescaped. Tests wait for moments instead of sleeping.
"""

from __future__ import annotations

from typing import Final, Protocol

COUNTED: Final = frozenset(
    {"execution.owned", "turn.committed", "step.tried", "executions.watched", "event.stored"}
)
"""Moments for those who count: they come by the thousand, and no log has them. Their fields may be things of
the part that says them."""


class Observer(Protocol):
    """Hears moments. Must not raise and must not block; it is called inside the event loop.

    worker:    execution.owned (flow, version, trigger, waited) · step.tried (flow, version, path, outcome) ·
               turn.committed (flow, version, facts, taken_back, began) · executions.watched (stuck)
    relay:     message.tried (state, outcome, status, error) · replies.posted (count, stored) ·
               endpoint.disabled (reason) · circuit.opened, circuit.closed (endpoint) · retry.clamped (endpoint) ·
               reply.unfit (endpoint, error), a reply in an answer that breaks the contract
    receiver:  receiver.started (host, port) · post.batch (size, stored) · event.stored (sender, answer) ·
               event.duplicate (tenant, sender) · event.conflict · event.unstorable (error) ·
               request.refused (status, reason, path, error) · connection.refused · post.failed (error) ·
               secret.unreadable (error) · receiver.draining · receiver.gave_up (at_work) · receiver.stopped
    all three: health.started (host, port)
    """

    def saw(self, moment: str, /, **fields: object) -> None: ...


class Several:
    """Passes each moment on to all of `observers`, in their order."""

    __slots__ = ("_observers",)

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def saw(self, moment: str, /, **fields: object) -> None:
        for observer in self._observers:
            observer.saw(moment, **fields)


class Silent:
    """The observer of those who do not listen."""

    __slots__ = ()

    def saw(self, moment: str, /, **fields: object) -> None:
        """Nothing."""
