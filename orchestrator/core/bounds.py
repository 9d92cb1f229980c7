"""How long what is asked later may take, and when it is tried again: as its author says, and as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, overload

from contracts.limits import CALL_TIMEOUT
from contracts.messages import Action
from orchestrator.core.ask import since
from orchestrator.core.errors import UsageError
from orchestrator.core.retry import ONCE, PROBE_RETRY, UNDO_RETRY, Retry

Json = Any
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Bounded:
    """`action`, with bounds of its own instead of those that every action of its kind has."""

    action: Action
    timeout: timedelta | None
    retry: Retry | None

    def as_action(self) -> dict[str, Json]:
        """As `action`, and `bounds`: `timeout` in seconds, `retry` as `Retry.as_data` says it.

        Raises UsageError for bounds that the action cannot have.
        """
        said = self.action.as_action()
        bounds: dict[str, Json] = {}
        if self.timeout is not None:
            bounds["timeout"] = self.timeout.total_seconds()
        if self.retry is not None:
            check(said, self.timeout, self.retry)
            bounds["retry"] = self.retry.as_data()
        return said | {"bounds": bounds}


@overload
def bounded(
    action: Callable[[A], Action | None], /, *, timeout: timedelta | None = None, retry: Retry | None = None
) -> Callable[[A], Action | None]: ...
@overload
def bounded(action: Action, /, *, timeout: timedelta | None = None, retry: Retry | None = None) -> Action: ...
def bounded(
    action: Action | Callable[[Any], Action | None],
    /,
    *,
    timeout: timedelta | None = None,
    retry: Retry | None = None,
) -> Action | Callable[[Any], Action | None]:
    """An undo, or how to make one from the result, or a probe, with bounds of its own:
    `undo=bounded(cancel, timeout=hours(2))`.

    `timeout` is for all its tries together (default: one day for a command, none for a function), `retry` says when
    it is tried again (default: a command that its service gave up is not, a function has 20 tries). What is not
    done then holds the execution. Its errors are told by code, since it may be done by another process.

    Raises UsageError for a timeout outside of (0, ten years]; and where the action is asked for, for a policy that
    names classes or lasts longer than the timeout.
    """
    since(timeout)
    if not callable(action):
        return Bounded(action, timeout, retry)

    def made(value: Any) -> Action | None:
        found = action(value)
        return None if found is None else Bounded(found, timeout, retry)

    return made


def check(said: dict[str, Json], timeout: timedelta | None, retry: Retry) -> None:
    """Raises UsageError for a policy that the action `said` cannot have."""
    what = f"bounded {said['name']}"
    classes = [one.__name__ for one in (*retry.only, *retry.never) if not isinstance(one, str)]
    if classes:
        raise UsageError(
            f"{what}: retry= by {classes[0]}: expected codes, since another process may have to try it"
        )
    longest = timeout or (CALL_TIMEOUT if said["do"] == "call" else None)
    if retry.within is not None and longest is not None and retry.within > longest:
        raise UsageError(f"{what}: retry.within of {retry.within}: expected at most its timeout of {longest}")


def bounds_of(action: dict[str, Json], *, probes: bool = False) -> tuple[timedelta | None, Retry]:
    """How long `action` may take, and when it is tried again: as it says, or as all of its kind. `probes`: it asks what
    became of something.
    """
    said: dict[str, Json] = action.get("bounds") or {}
    local = action["do"] == "step"
    timeout, retry = said.get("timeout"), said.get("retry")
    usual = None if local else CALL_TIMEOUT
    return (
        usual if timeout is None else timedelta(seconds=timeout),
        (UNDO_RETRY if local else PROBE_RETRY if probes else ONCE)
        if retry is None
        else Retry.from_data(retry),
    )
