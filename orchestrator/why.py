"""Why an execution is where it is: one sentence for every state, from what the database says.

A pure function. There is no sentence for "something else": what no rule here knows raises UnknownState.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from orchestrator.core.errors import STOPPING
from orchestrator.core.status import Status
from orchestrator.core.waiting import open_in
from orchestrator.explanation import Code, Explanation, journal, unknown
from orchestrator.standing import stands
from orchestrator.store.situation import Situation
from orchestrator.waits import later, own, subject, waiters, waiting, whose
from orchestrator.words import failure, when

Json = Any


def explain(it: Situation, now: datetime) -> Explanation:
    """Why the execution of `it` is where it is. The first rule that fits counts. Raises UnknownState."""
    row = it.row
    if row.finished_at is not None:
        return finished(it, now)
    told = unfinished(it, now)
    for mutex in own(it):
        if mutex.granted_at is not None:
            has = f"It has had the mutex {mutex.key} of {whose(mutex)} since {when(mutex.granted_at, now)}"
            told = replace(told, sentence=f"{told.sentence} {has}; {waiters(mutex.waiting)} for it.")
    if row.deadline_at is None:
        return told
    be = "is" if row.deadline_at > now else "was"
    return replace(told, sentence=f"{told.sentence} Its deadline {be} at {when(row.deadline_at, now)}.")


def unfinished(it: Situation, now: datetime) -> Explanation:
    row = it.row
    if it.around.stuck is not None:
        return stuck(it)
    if row.owner is not None:
        return owned(it, now)
    if row.wake_at is not None and row.wake_at <= now:
        return due(it, now)
    return at_rest(it, now)


def at_rest(it: Situation, now: datetime) -> Explanation:
    match it.row.status:
        case Status.HELD:
            return held(it, now)
        case Status.PAUSED:
            return Explanation(Code.PAUSED, "An operator paused it.")
        case Status.OPEN:
            return waiting(it, now)
        case _:
            raise unknown(it, f"status {it.row.status}")


# ---- at an end, in somebody's hands, or due --------------------------------------------------------------------


def finished(it: Situation, now: datetime) -> Explanation:
    row, last = it.row, list(journal(it))[-1]
    said = last.data
    assert row.finished_at is not None, "it is finished"
    at, error = when(row.finished_at, now), failure(said.get("error"))
    left = f"; still standing: {', '.join(map(str, standing))}" if (standing := stands(it.facts)) else ""
    match row.status:
        case Status.COMPLETED:
            sentence = f"It completed at {at}{left}."
        case Status.COMPENSATED:
            sentence = f"It failed at {at} with {error}, and all that was done is undone."
        case Status.FAILED if last.kind == "terminated":
            sentence = f"It was terminated at {at} by {said['by']} ({said['reason']}){left}."
        case Status.FAILED:
            sentence = f"It failed at {at} with {error}{left or '; nothing was there to undo'}."
        case Status.CANCELLED:
            sentence = f"It was cancelled at {at}{because(said)}{undone(said)}{left}."
        case _:
            raise unknown(it, f"status {row.status}")
    return Explanation(Code(row.status), sentence, since=row.finished_at)


def because(said: dict[str, Json]) -> str:
    """Why it was cancelled, when somebody gave a reason."""
    reason = said.get("reason")
    return f" ({reason})" if reason and reason != "cancelled" else ""


def undone(said: dict[str, Json]) -> str:
    count = said.get("undone")
    return f"; {count} {'step is' if count == 1 else 'steps are'} undone" if count else ""


BROKEN: Final = {
    "no-reason": "no time, no message, no event and no owner would move it",
    "lost-wake-up": "it has mail, and no time at which somebody would read it",
    "lost-order": "it got an order, and no time at which somebody would read it",
    "owner-gone": "its worker is gone, and nobody took it over",
    "mutex-stranded": "whoever has the mutex that it waits for has ended without letting it go",
}


def stuck(it: Situation) -> Explanation:
    why = it.around.stuck
    if why not in BROKEN:
        raise unknown(it, f"stuck: {why}")
    told = f"It is stuck: {BROKEN[why]}. This is a bug, or rows were edited by hand."
    do = f"report it with the output of `waypost show {it.row.execution_id} -o json`"
    return Explanation(Code.STUCK, told, do=(do,))


def owned(it: Situation, now: datetime) -> Explanation:
    row, worker = it.row, it.worker
    if worker is None:
        raise unknown(it, f"owner {row.owner} without a row")
    name, since = f"Worker {worker.worker_id} on {worker.host}", it.facts[-1].recorded_at
    if worker.dead_at is not None or worker.lease_until <= now:
        silent = worker.dead_at or worker.lease_until
        told = f"{name} had it and has been gone since {when(silent, now)}; another worker takes it over."
        do = ("see that a `waypost worker` runs",)
        return Explanation(Code.WORKER_LOST, told, since=silent, until=None, holder=worker.worker_id, do=do)
    local = next((ask for ask in open_in(journal(it)).asks if ask.do == "step" and not later(ask, now)), None)
    task, path, attempt = "has been taking its turn", "", None
    if local is not None:
        since, path, attempt = local.next_at or local.asked_at, local.path, local.tries + 1
        task = f"has been running try {attempt} of {subject(local)}"
    told = f"{name} {task} since {when(since, now)}; its lease lasts until {when(worker.lease_until, now)}."
    return Explanation(
        Code.RUNNING, told, since=since, until=worker.lease_until, path=path, attempt=attempt,
        holder=worker.worker_id,
    )  # fmt: skip


def due(it: Situation, now: datetime) -> Explanation:
    row, flow = it.row, f"{it.row.definition}@{it.row.version}"
    assert row.wake_at is not None, "it is due"
    since = row.wake_at
    if not it.around.holders:
        told = f"It has been ready since {when(since, now)}, but no worker that lives has {flow}."
        return Explanation(
            Code.NO_WORKER, told, since=since, do=(f"run `waypost worker MODULE` with the module of {flow}",)
        )
    ordered = row.status != Status.OPEN
    what = "An order to it has waited to be read" if ordered else "It has been ready"
    workers = "1 worker" if it.around.holders == 1 else f"one of {it.around.holders} workers"
    told = f"{what} since {when(since, now)}, and waits for {workers} with {flow}."
    return Explanation(Code.ORDERED if ordered else Code.READY, told, since=since)


# ---- a person is needed ----------------------------------------------------------------------------------------

STOPPED: Final = {
    "nondeterminism": "its program no longer agrees with its journal",
    "program-fault": "its program has a bug",
    "limit": "it reached a limit",
    "input-invalid": "its recorded input no longer fits its program",
    "unstorable": "the database refused what it says",
    "payload-unavailable": "the payload store did not give one of its large payloads",
}

UNDECIDED: Final = {
    "undo-failed": ("an undo failed", ("retry", "done", "skip")),
    "undo-unknown": ("nobody knows how to undo", ("done", "skip")),
    "unknown-outcome": ("nobody knows what became of a step", ("done --value JSON", "not_done", "skip")),
}


def held(it: Situation, now: datetime) -> Explanation:
    fact = next((fact for fact in reversed(list(journal(it))) if fact.kind == "held"), None)
    if fact is None:
        raise unknown(it, "held, without a fact that says why")
    code, reason, who = fact.data.get("code", ""), fact.data.get("reason", ""), "--by NAME --reason TEXT"
    because = f" ({reason})" if reason else ""
    if code in STOPPING:
        told = f"It has been held since {when(fact.at, now)}: {STOPPED[code]}{because}."
        do = (f"mend that, then `waypost resume {it.row.execution_id} {who}`",)
    elif code in UNDECIDED:
        what, verdicts = UNDECIDED[code]
        told = f"It has been held since {when(fact.at, now)} at {fact.path}: {what}{because}; a person has to decide."
        resolve = f"waypost resolve {it.row.execution_id} {shlex.quote(fact.path)}"
        do = tuple(f"`{resolve} {verdict} {who}`" for verdict in verdicts)
    else:
        raise unknown(it, f"held by {code!r}")
    return Explanation(Code(code), told, since=fact.at, path=fact.path, do=do)
