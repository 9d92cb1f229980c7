"""Which approval a person means, and whether it can be decided so."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.errors import Conflict, ContractViolation, NotFound, shown
from orchestrator.core.status import TERMINAL
from orchestrator.store.approvals import ApprovalRow


class UnknownSubject(NotFound):
    """An execution has asked for no approval of that name."""

    code = "unknown-subject"


class NotWaiting(Conflict):
    """Nobody waits for this decision (any more); nothing was changed."""

    code = "not-waiting"


class AlreadyDecided(Conflict):
    """Somebody else, or something else, was first; nothing was changed."""

    code = "already-decided"

    def __init__(self, subject: str, choice: str, by: str) -> None:
        super().__init__(f"approval {shown(subject)} is decided: {shown(choice)} by {shown(by)}")
        self.subject = subject
        self.choice = choice
        self.by = by


class ChoiceInvalid(ContractViolation):
    """What was chosen is not offered, or could be meant for several approvals."""

    code = "choice-invalid"


def meant(
    asked: Sequence[ApprovalRow], subject: str, choice: str, *, by: str, execution: str, status: str
) -> ApprovalRow | None:
    """The approval of `execution` that `by` decides with `choice`; None when that is so already.

    `subject` may also be the path of one, when several are called the same.

    Raises UnknownSubject, AlreadyDecided, NotWaiting, ChoiceInvalid.
    """
    named = [one for one in asked if subject in (one.subject, one.path)]
    open_ = [one for one in named if one.state == "waiting"]
    if len(open_) > 1:
        raise ChoiceInvalid(
            f"{len(open_)} approvals of execution {execution} are called {shown(subject)}: expected the path of one of "
            f"them: {', '.join(one.path for one in open_)}"
        )
    if not open_:
        return passed(named, subject, choice, by=by, execution=execution, status=status, asked=asked)
    if choice not in open_[0].choices:
        raise ChoiceInvalid(
            f"approval {shown(subject)}: expected one of {', '.join(open_[0].choices)}, found {shown(choice)}"
        )
    return open_[0]


def passed(
    named: Sequence[ApprovalRow],
    subject: str,
    choice: str,
    *,
    by: str,
    execution: str,
    status: str,
    asked: Sequence[ApprovalRow],
) -> None:
    """Returns when the last one of that name is decided just so. Raises what else may be."""
    if not named and status in TERMINAL:
        raise NotWaiting(f"execution {execution} is {status}: it waits for no decision")
    if not named:
        waits = ", ".join(sorted({one.subject for one in asked if one.state == "waiting"}))
        raise UnknownSubject(
            f"execution {execution} has no approval {shown(subject)}; it waits for: {waits or 'none'}"
        )
    last = named[-1]
    match last.state:
        case "decided":
            if (last.choice, last.decided_by) != (choice, by):
                raise AlreadyDecided(last.subject, last.choice or "", last.decided_by or "")
        case "expired":
            assert last.expires_at is not None, "what expires says when"
            raise NotWaiting(f"approval {shown(subject)} expired at {last.expires_at:%Y-%m-%d %H:%M:%S %Z}")
        case "over":
            raise NotWaiting(f"execution {execution} is {status}: it waits for no decision")
        case _:
            raise NotWaiting(f"execution {execution} waits no more for approval {shown(subject)}")
