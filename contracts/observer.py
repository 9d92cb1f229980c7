"""The one door through which the parts say what happened: logs, metrics, traces and tests listen there.

A moment is a fixed name in the past tense, its fields are facts (ids, counts, reasons) and never payloads,
secrets or text that a stranger wrote unescaped. Tests wait for moments instead of sleeping.
"""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Hears moments. Must not raise and must not block; it is called inside the event loop.

    relay:     message.tried (state, outcome, status, error) · replies.posted (count, stored) ·
               reply.unfit (endpoint, error), a reply in an answer that breaks the contract
    receiver:  receiver.started (host, port) · post.batch (size, stored) · event.duplicate (tenant, sender) ·
               event.conflict · event.unstorable (error) · request.refused (status, reason, path, error) ·
               connection.refused · post.failed (error) · secret.unreadable (error) · receiver.draining ·
               receiver.gave_up (at_work) · receiver.stopped
    """

    def saw(self, moment: str, /, **fields: object) -> None: ...


class Silent:
    """The observer of those who do not listen."""

    __slots__ = ()

    def saw(self, moment: str, /, **fields: object) -> None:
        """Nothing."""
