"""What a person may do about an execution, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import Final

from orchestrator.cli.output import ago, plain
from orchestrator.client import ExecutionView
from orchestrator.core.ask import STEP_VERDICTS, UNDO_VERDICTS
from orchestrator.core.errors import STOPPING
from orchestrator.store.reading import MessageRow
from orchestrator.store.tries import TryRow

TIMES: Final = "\N{MULTIPLICATION SIGN}"


def decision(view: ExecutionView) -> str:
    """The command that lets a held execution go on; empty when it is not held."""
    if (held := view.held) is None:
        return ""
    execution = view.row.execution_id
    if held.code in STOPPING:
        return f"waypost resume {execution} --by NAME --reason TEXT"
    verdicts = STEP_VERDICTS if held.code == "unknown-outcome" else UNDO_VERDICTS
    return (
        f"waypost resolve {execution} {plain(held.path)} {'|'.join(sorted(verdicts))} --by NAME --reason TEXT"
    )


def standing(view: ExecutionView) -> str:
    """The steps that are not undone and will not be, and who said so; empty when there are none."""
    return ", ".join(plain(str(one)) for one in view.stands)


def unserved(view: ExecutionView, served: bool) -> str:  # noqa: FBT001  # said by its name where it is asked
    """Why an execution that is ready does not run; empty when somebody could run it."""
    if served or view.row.state != "ready":
        return ""
    return f": no worker runs {plain(view.row.definition)}@{plain(view.row.version)}"


def answers(message: MessageRow, tried: Sequence[TryRow], *, now: datetime) -> str:
    """What became of each try, equal ones counted, and when the next one is due."""
    said = (answer_of(one) for one in tried)
    counted = [(answer, len(list(same))) for answer, same in groupby(said)]
    words = [answer if count == 1 else f"{answer} {TIMES}{count}" for answer, count in counted]
    if message.state == "due" and tried:
        words.append(f"next {due(message.due_at, now=now)}")
    return ", ".join(words)


def answer_of(one: TryRow) -> str:
    """The status and what was wrong, as far as there are any; else what the relay made of the try."""
    said = [str(it) for it in (one.status, one.error_code) if it is not None]
    return " ".join(said) or one.outcome


def due(moment: datetime | None, *, now: datetime) -> str:
    """`in 10 s`, `now`, or `due 20 s ago`."""
    text = ago(moment, now=now)
    return text if moment is None or moment >= now or text == "now" else f"due {text} ago"
