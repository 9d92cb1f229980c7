"""Why an open execution waits: what is open in its journal, and what the tables say about that."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

from contracts.limits import SHOWN_CHARACTERS_MAX
from orchestrator.core.status import Status
from orchestrator.core.waiting import OpenAsk, open_in
from orchestrator.explanation import Code, Explanation, journal, unknown
from orchestrator.store.kin import ChildRow
from orchestrator.store.mutexes import MutexRow
from orchestrator.store.reading import MessageRow
from orchestrator.store.situation import Situation
from orchestrator.store.tasks import TaskRow
from orchestrator.words import failure, last_try, when


def waiting(it: Situation, now: datetime) -> Explanation:
    if it.facts[-1].kind == "orphaned" and it.row.wake_at is not None:
        since, until = it.facts[-1].at, it.row.wake_at
        died = f"Workers died while they owned it, last at {when(since, now)}"
        told = f"{died}; it is taken up again at {when(until, now)}."
        return Explanation(Code.TAKEN_OVER, told, since=since, until=until)
    found = open_in(journal(it))
    told = [open_ask(it, ask, now) for ask in found.asks if not ask.probing]
    if not told:
        told = [settling(it, ask, now) for ask in found.settling]
    if not told:
        raise unknown(it, f"nothing open after fact {it.row.position}, next look {it.row.wake_at}")
    first = min(told, key=lambda one: (not one.do, one.until is None, one.until or now))
    return replace(first, also=tuple(one for one in told if one is not first))


def open_ask(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:  # a case for each kind
    match ask.kind, ask.do:
        case "timer", _ if ask.due is not None:
            told = f"It has been sleeping since {when(ask.asked_at, now)}, until {when(ask.due, now)}."
            if ask.args.get("reminds"):
                told = f"It reminds of {ask.args['reminds']} at {when(ask.due, now)}."
            return Explanation(Code.SLEEPING, told, since=ask.asked_at, until=ask.due, path=ask.path)
        case "event", _:
            until = "" if ask.due is None else f", until {when(ask.due, now)}"
            told = f"It has been waiting since {when(ask.asked_at, now)} for {event(ask)}{until}.{come(it, ask, now)}"
            return Explanation(Code.AWAITING_EVENT, told, since=ask.asked_at, until=ask.due, path=ask.path)
        case "decision" | "child" | "mutex", _:
            return OTHERS[ask.kind](it, ask, now)
        case _, ("step" | "call" | "task") if ask.next_at is not None:
            told = (
                f"It waits for try {ask.tries + 1} of {subject(ask)} at {when(ask.next_at, now)}: "
                f"try {ask.tries} failed with {failure(ask.error)}{deadline(ask, now)}."
            )
            return Explanation(
                Code.STEP_RETRY,
                told,
                since=ask.asked_at,
                until=ask.next_at,
                path=ask.path,
                attempt=ask.tries + 1,
            )
        case (("call" | "probe" | "undo"), "call"):
            return called(it, ask, now)
        case "task", "task":
            return queued(it, ask, now)
        case _:
            raise unknown(it, f"{ask.kind} {ask.what} open at {ask.path!r}")


def undecided(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:
    """A person is asked. One who has decided meanwhile has sent mail, so that it is due."""
    subject, choices = str(ask.args.get("subject")), [str(one) for one in ask.args.get("choices", ())]
    until = "" if ask.due is None else f", until {when(ask.due, now)}"
    told = (
        f"It has been waiting since {when(ask.asked_at, now)} for {', '.join(ask.args.get('who', ()))} to decide "
        f"about {subject} (at {ask.path}): {' or '.join(choices)}{until}."
    )
    decide = f"waypost decide {it.row.execution_id} {shlex.quote(subject)}"
    do = tuple(f"`{decide} {shlex.quote(choice)} --by NAME`" for choice in choices)
    return Explanation(Code.AWAITING_DECISION, told, since=ask.asked_at, until=ask.due, path=ask.path, do=do)


def with_child(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:
    """A child is waited for, also when it was told to end."""
    child = child_at(it, ask)
    who = f"{subject(ask)}, execution {child.execution_id}, which is {child.state}"
    if ask.withdrawn:
        told = f"It needs {who}, no more: it told it to end, and waits for that."
        code = Code.ENDING_CHILD
    else:
        told = f"It has been waiting since {when(ask.asked_at, now)} for {who}{deadline(ask, now)}."
        code = Code.AWAITING_CHILD
    return Explanation(code, told, since=ask.asked_at, until=ask.due, path=ask.path, do=needs(child))


def needs(child: ChildRow) -> tuple[str, ...]:
    """What a person can do about a child that waits for one."""
    return (f"`waypost why {child.execution_id}`",) if child.state == Status.HELD else ()


def its_turn(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:
    """Others have the mutex that it is to have, or are before it."""
    mine = next((row for row in own(it) if row.path == ask.path and row.granted_at is None), None)
    if mine is None:
        raise unknown(it, f"no row for the mutex at {ask.path!r}")
    same = [row for row in it.mutexes if (row.kind, row.key) == (mine.kind, mine.key) and row is not mine]
    holder = next((row for row in same if row.granted_at is not None), None)
    has = "nobody has now, so that a worker gives it to the next one"
    if holder is not None and holder.granted_at is not None:
        who = f"execution {holder.execution_id} of {holder.definition}@{holder.version}"
        state = "" if holder.status == "open" else f" ({holder.status})"
        has = f"{who}{state} has had since {when(holder.granted_at, now)}"
    others = f"{waiters(mine.ahead)} before it"
    told = (
        f"It has been waiting since {when(ask.asked_at, now)} for the mutex {mine.key} of {whose(mine)}, which {has}; "
        f"{others}."
    )
    do = () if holder is None or holder.status == "open" else (f"see `waypost why {holder.execution_id}`",)
    return Explanation(
        Code.AWAITING_MUTEX, told, since=ask.asked_at, path=ask.path, do=do,
        holder=None if holder is None else holder.execution_id,
    )  # fmt: skip


def waiters(count: int) -> str:
    return "nobody waits" if count == 0 else "1 waits" if count == 1 else f"{count} wait"


def own(it: Situation) -> list[MutexRow]:
    return [row for row in it.mutexes if row.execution_id == it.row.execution_id]


def whose(row: MutexRow) -> str:
    """What has the mutex of `row`: a step, or the whole flow."""
    return "the flow" if row.kind == "flow" else f"step {row.path.removesuffix('/mutex')}"


def called(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:
    message = message_at(it, ask.path)
    match message.state:
        case "waiting":
            code, until, do = (
                Code.BEHIND,
                ask.due,
                (f"see what `waypost endpoint show {message.endpoint}` says",),
            )
            words, attempt = f"waits behind another command in a lane of endpoint {message.endpoint}", 1
        case "due":
            code, words, until, do = unsent(it, message, now)
            attempt = message.attempts + 1
        case "sending":
            code, words, until, do = being_sent(message, now)
            attempt = message.attempts
        case "delivered" if not message.replied:
            code, until, do = Code.AWAITING_REPLY, ask.due, ()
            words, attempt = f"waits for the reply of {message.endpoint}", message.attempts
        case "expired":
            code, until, do = Code.UNDELIVERED, ask.due, ()
            words, attempt = f"could not be delivered to {message.endpoint} in time", message.attempts
        case _:
            raise unknown(it, f"message {message.state} for what is open at {ask.path!r}")
    told = (
        f"{capital(subject(ask))}, asked at {when(ask.asked_at, now)}, {words}; "
        f"{last_try(message, now)}{deadline(ask, now)}."
    )
    return Explanation(
        code, told, since=ask.asked_at, until=until or ask.due, path=ask.path, attempt=attempt,
        holder=message.endpoint, do=do,
    )  # fmt: skip


OTHERS: Final[Mapping[str, Callable[[Situation, OpenAsk, datetime], Explanation]]] = {
    "decision": undecided,
    "child": with_child,
    "mutex": its_turn,
}
"""What is said while others are waited for, by the kind of the ask."""


def queued(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:
    """Work for the workers of a queue: nobody has it, or one of them."""
    task = task_at(it, ask.path)
    do: tuple[str, ...] = ()
    match task.state:
        case "due":
            code, until = Code.TASK_QUEUED, ask.due
            since = when(task.available_at, now)
            words = f"has waited since {since} for a worker of queue {task.queue}, try {task.attempt}"
            do = (f"see that `waypost tasks MODULE --queue {shlex.quote(task.queue)}` runs",)
        case "expired":
            code, until = Code.UNDELIVERED, ask.due
            words = f"was taken by no worker of queue {task.queue} in time"
        case "running" | "stopping" if task.lease_until is not None and task.began_at is not None:
            code, until, words = done_by(task, task.began_at, task.lease_until, now)
        case _:
            raise unknown(it, f"task {task.state} for what is open at {ask.path!r}")
    told = f"{capital(subject(ask))}, asked at {when(ask.asked_at, now)}, {words}{deadline(ask, now)}."
    return Explanation(
        code, told, since=task.began_at or task.available_at, until=until, path=ask.path, attempt=task.attempt,
        holder=task.owner or task.queue, do=do,
    )  # fmt: skip


def done_by(task: TaskRow, began: datetime, until: datetime, now: datetime) -> tuple[Code, datetime, str]:
    """Code, end of the lease and the middle of a sentence about a task that a worker has."""
    who = f"by {task.owner} of queue {task.queue}, try {task.attempt}"
    if until <= now:
        return (
            Code.TASK_SILENT,
            until,
            f"was being done {who}, which has been silent since {when(until, now)}",
        )
    said = "" if task.progress is None else f", last said {json.dumps(task.progress)[:SHOWN_CHARACTERS_MAX]}"
    words = f"has been done since {when(began, now)} {who}{said}; the lease lasts until {when(until, now)}"
    return Code.TASK_RUNNING, until, words


Said = tuple[Code, str, datetime | None, tuple[str, ...]]
"""Code, the middle of a sentence, until when, and what a person can do."""


def unsent(it: Situation, message: MessageRow, now: datetime) -> Said:
    name = message.endpoint
    endpoint = next((one for one in it.endpoints if one.name == name), None)
    if endpoint is None:
        words, do = f"cannot be sent: endpoint {name} is not registered", f"`waypost endpoint add {name} URL`"
        return Code.ENDPOINT_UNKNOWN, words, None, (do,)
    if endpoint.state != "enabled":
        words = f"cannot be sent: endpoint {name} is {endpoint.state}"
        return (
            Code.ENDPOINT_DISABLED,
            words,
            None,
            (f"`waypost endpoint enable {name}`",),
        )
    if not endpoint.has_secret:
        do = f"`waypost endpoint rotate {name}`"
        return (
            Code.ENDPOINT_NO_SECRET,
            f"cannot be sent: endpoint {name} has no secret that is valid",
            None,
            (do,),
        )
    if endpoint.paused_until is not None and endpoint.paused_until > now:
        words = (
            f"waits to be sent: endpoint {name} asked for a pause until {when(endpoint.paused_until, now)}"
        )
        return Code.ENDPOINT_PAUSED, words, endpoint.paused_until, ()
    return to_be_sent(message, now, is_open=endpoint.open_until is not None)


def to_be_sent(message: MessageRow, now: datetime, *, is_open: bool) -> Said:
    """Nothing is in the way but its time, or an endpoint to which hardly anything gets through."""
    name, number = message.endpoint, message.attempts + 1
    if message.due_at > now:
        words = f"waits for try {number} to reach {name} at {when(message.due_at, now)}"
        return Code.DELIVERY_RETRY, words, message.due_at, ()
    if is_open:
        words = f"waits to be sent: hardly anything got through to endpoint {name}, which is tried once in a while"
        return Code.CIRCUIT_OPEN, words, None, (f"see what `waypost endpoint show {name}` says",)
    words = f"has waited since {when(message.due_at, now)} for a relay to send it to {name}, try {number}"
    return Code.TO_BE_SENT, words, None, ("see that a `waypost relay` runs",)


def being_sent(message: MessageRow, now: datetime) -> Said:
    assert message.lease_until is not None, "a message that is sent has a claim"
    number, until = message.attempts, message.lease_until
    if until <= now:
        relay = f"a relay that has been gone since {when(until, now)}"
        words = f"was being sent to {message.endpoint} by {relay}, try {number}"
        return Code.RELAY_LOST, words, None, ("see that a `waypost relay` runs",)
    words = f"is being sent to {message.endpoint}, try {number}, which ends by {when(until, now)}"
    return Code.SENDING, words, until, ()


def settling(it: Situation, ask: OpenAsk, now: datetime) -> Explanation:
    doing = "is undoing, and waits" if it.row.undoing else "waits"
    over = "which was withdrawn" if ask.withdrawn else "whose time is over"
    if ask.kind == "child":
        child = child_at(it, ask)
        told = (
            f"It {doing} to know what became of {subject(ask)}, whose "
            f"time is over: it told execution {child.execution_id}, which is {child.state}, to end."
        )
        return Explanation(Code.ENDING_CHILD, told, since=ask.due, path=ask.path, do=needs(child))
    if ask.do == "task":
        task = task_at(it, ask.path)
        if task.state != "stopping" or task.lease_until is None:
            raise unknown(it, f"task {task.state} for what settles at {ask.path!r}")
        told = (
            f"It {doing} to know what became of {subject(ask)}, {over}: {task.owner} of queue {task.queue} has try "
            f"{task.attempt}, and a lease until {when(task.lease_until, now)}."
        )
        return Explanation(
            Code.SETTLING, told, since=ask.due, until=task.lease_until, path=ask.path, attempt=task.attempt,
            holder=task.owner,
        )  # fmt: skip
    message = message_at(it, ask.path)
    if message.state != "stopping" or message.lease_until is None:
        raise unknown(it, f"message {message.state} for what settles at {ask.path!r}")
    told = (
        f"It {doing} to know what became of {subject(ask)}, {over}: "
        f"try {message.attempts} to reach {message.endpoint} ends by {when(message.lease_until, now)}."
    )
    return Explanation(
        Code.SETTLING, told, since=ask.due, until=message.lease_until, path=ask.path, attempt=message.attempts,
        holder=message.endpoint,
    )  # fmt: skip


# ---- words -----------------------------------------------------------------------------------------------------


def message_at(it: Situation, path: str) -> MessageRow:
    found = next((one for one in reversed(it.messages) if one.path == path), None)
    if found is None:
        raise unknown(it, f"no message for what is open at {path!r}")
    return found


def child_at(it: Situation, ask: OpenAsk) -> ChildRow:
    found = next((one for one in it.children if one.execution_id == ask.args.get("execution")), None)
    if found is None:
        raise unknown(it, f"no child for what is open at {ask.path!r}")
    return found


def task_at(it: Situation, path: str) -> TaskRow:
    found = next((one for one in reversed(it.tasks) if one.path == path), None)
    if found is None:
        raise unknown(it, f"no task for what is open at {path!r}")
    return found


def subject(ask: OpenAsk) -> str:
    """What is asked, and where; an undo says what it takes back, a probe what it asks about."""
    if ask.kind == "child":
        return f"child {ask.args.get('flow')} (at {ask.path})"
    if ask.kind == "undo":
        return f"the undo of {ask.name} by {ask.what} (at {ask.path})"
    if ask.kind == "probe":
        return f"the probe of {ask.name} by {ask.what} (at {ask.path})"
    if ask.do == "task":
        return f"task {ask.what} (at {ask.path})"
    local = "transaction" if ask.kind == "transaction" else "step"
    return f"{local if ask.do == 'step' else 'command'} {ask.what} (at {ask.path})"


def event(ask: OpenAsk) -> str:
    keyed = f"with key {ask.key}" if ask.key else "without a key"
    return f"an event {ask.what} {keyed} (at {ask.path})"


def come(it: Situation, ask: OpenAsk, now: datetime) -> str:
    """That the event has come and waits for another one, if so."""
    for row in it.ahead:
        if (row.type, row.key) == (ask.what, ask.key or ""):
            return f" One has come ({row.id}) and waits for the event before it, until {when(row.due_at, now)} at most."
    return ""


def deadline(ask: OpenAsk, now: datetime) -> str:
    return "" if ask.due is None else f"; its time is over at {when(ask.due, now)}"


def later(ask: OpenAsk, now: datetime) -> bool:
    return ask.next_at is not None and ask.next_at > now


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
