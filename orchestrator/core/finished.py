"""What the last fact of a program says: how it ended, and what is left standing."""

from __future__ import annotations

from typing import Any, TypeAlias

from contracts.errors import NotEncodable, TooLarge
from orchestrator.core.errors import Cancelled, StepFailed, storable, structure
from orchestrator.core.journal import Journal
from orchestrator.core.status import Status
from orchestrator.core.undoing import Undoing

Json = Any
End: TypeAlias = tuple[Status, Json, dict[str, Json], str | None]
"""Status, what the program returned or raised, what the fact says, and the same in JSON where that is known."""


def finished(
    journal: Journal, undoing: Undoing, standing: list[str], value: Json, error: BaseException | None
) -> End:
    """The end of a program that returned `value` or raised `error`; `standing` was not undone when it ended."""
    status, result, said, text = (
        completed(journal, value) if error is None else failed(journal, undoing, error)
    )
    data = {"kind": str(status), **said}
    if undoing.undone > 0 or status is Status.COMPENSATED:
        data["undone"], text = undoing.undone, None
    left = undoing.stands
    if status is not Status.COMPLETED:
        left = [*undoing.passed, *left, *standing]
    if left:
        data["stands"], text = list(left), None
    return status, result, data, text


def completed(journal: Journal, value: Json) -> End:
    """An end without error; a result that cannot be stored is a failure."""
    try:
        text = journal.encoded({"kind": str(Status.COMPLETED), "output": value}, what="the flow's output")
    except (NotEncodable, TooLarge) as error:
        code = "too-large" if isinstance(error, TooLarge) else "not-encodable"
        unfit = StepFailed("", "the flow's output", {"code": code, "detail": str(error)})
        return Status.FAILED, unfit, {"error": structure(unfit)}, None
    return Status.COMPLETED, value, {"output": value}, text


def failed(journal: Journal, undoing: Undoing, error: BaseException) -> End:
    """An end by `error`: of whoever wanted it to end, or compensated when all was undone that had to be."""
    if isinstance(error, Cancelled):
        return Status.CANCELLED, error, {"reason": storable(str(error))}, None
    done = undoing.undone > 0 and not undoing.stands and not undoing.pivoted
    status = Status.COMPENSATED if done else Status.FAILED
    return status, error, {"error": told_of(journal, error)}, None


def told_of(journal: Journal, error: BaseException) -> dict[str, Json]:
    """`error` as it can be stored: without its data, where that is too large or no JSON."""
    told = structure(error)
    try:
        journal.encoded({"error": told}, what="the flow's error")
    except (NotEncodable, TooLarge):
        del told["data"]
    return told
