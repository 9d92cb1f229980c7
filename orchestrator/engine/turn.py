"""What an execution commits, from what its machine has said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from contracts.identifiers import message_id
from orchestrator.core.ask import Ask
from orchestrator.core.attributes import value_of
from orchestrator.core.fact import Fact
from orchestrator.core.follows import ClosedWait, Follows, LeftChild, LetGo, SentAgain, TakenBack
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import FLOW
from orchestrator.core.status import TERMINAL, TRANSITIONS, Status
from orchestrator.engine.clock import Clock
from orchestrator.engine.families import family_of
from orchestrator.engine.inputs import Inputs
from orchestrator.engine.message import Identity, Wire, asked_again, event_of, message_of, task_of
from orchestrator.store.commits import ClosedWait as ClosedWaitRow
from orchestrator.store.commits import (
    NewAttribute,
    NewEvent,
    NewMessage,
    NewMutex,
    NewTask,
    NewWait,
    Turn,
)
from orchestrator.store.executions import Claim

Json = Any

NONE: Final[Mapping[int, str]] = {}

LEAVING: Final = frozenset({"call", "probe", "undo"})
"""Kinds of asks that may leave as a message."""

RESTING: Final = frozenset({*TERMINAL, Status.HELD, Status.PAUSED})
"""Statuses in which nobody owns an execution."""


def turn_of(
    claim: Claim,
    *,
    position: int,
    machine: Machine,
    facts: list[Fact],
    inputs: Inputs,
    mail_known: int,
    before: Status,
    status: Status,
    release: bool,
    clock: Clock,
    wire: Wire,
    bases: Mapping[int, str] = NONE,
) -> Turn:
    """The turn that takes the execution of `claim` from `position` and status `before` on by `facts`.

    `machine` is what said them; `mail_known` is the number of the last mail that was loaded. A turn that ends a wait
    which no event has filled, or times a message out, is for this mail only: what came meanwhile may change it.
    `bases` has the traceparent of the segment of each fact, where a trace has any.
    """
    assert status in TRANSITIONS[before], f"{claim.execution}: {before} to {status}"
    turn = Turn(
        tenant=claim.tenant,
        execution=claim.execution,
        fence=claim.fence,
        position=position,
        epoch=claim.epoch,
        next_epoch=claim.epoch + 1 if machine.continues else None,
        facts=facts,
        mail=inputs.mail,
        orders=inputs.orders,
        status=str(status),
        undoing=bool(machine.undoing),
        release=release or status in RESTING,
        due=due_of(machine, clock),
        guard=mail_known if inputs.guard else None,
        asks=False,
    )
    asked = [fact for fact in facts if fact.kind == "asked"]
    noted = [fact for fact in facts if fact.kind == "noted"]
    left: list[LeftChild] = []
    if machine.follows:
        following = machine.follows.up_to(position + len(facts))
        follow(turn, following, filled=inputs.filled, mail_known=mail_known)
        left = following.of(LeftChild)
        again = map(asked_again, following.of(SentAgain))
        asked = sorted([*asked, *again], key=lambda fact: fact.position)
    if asked:
        identity = partial(identity_of, claim, machine)
        ask(turn, asked, machine, identity=identity, wire=wire, bases=bases)
    if noted:
        turn.attributes = published_by(noted)
        if any(is_emitted(fact) for fact in noted):
            turn.events = events_of(noted, identity_of(claim, machine), wire, bases)
    turn.family = family_of(claim, machine, facts, left, bases)
    turn.asks = bool(asked or turn.family.children)
    return turn


def due_of(machine: Machine, clock: Clock) -> datetime | None:
    """When there is something to do without mail: at once, at its earliest due time, or never."""
    if machine.continues or machine.has_runnable():
        return clock.now()
    due = machine.next_due()
    return None if due is None else due[0]


def ask(
    turn: Turn,
    asked: Sequence[Fact],
    machine: Machine,
    *,
    identity: Callable[[], Identity],
    wire: Wire,
    bases: Mapping[int, str],
) -> None:
    """What the facts in `asked` leave with `turn`: messages, tasks, waits for events and for mutexes."""
    kinds = {fact.data["kind"] for fact in asked}
    if kinds & LEAVING and any(asks_for_message(fact) for fact in asked):
        turn.messages = messages_of(asked, identity(), wire, bases)
    if "task" in kinds:
        turn.tasks = tasks_of(asked, identity(), bases)
    last = turn.position + len(turn.facts)
    if "event" in kinds:
        turn.waits = new_waits(machine, position=turn.position, last=last)
    if "mutex" in kinds:
        turn.mutexes = new_mutexes(machine, position=turn.position, last=last)


def follow(turn: Turn, follows: Follows, *, filled: Collection[str], mail_known: int) -> None:
    """What else than its facts follows from what was said: what is taken back, closed, or let go."""
    taken = follows.of(TakenBack)
    turn.taken_back = [identity_back(turn, one) for one in taken if not one.task]
    turn.tasks_back = [identity_back(turn, one) for one in taken if one.task]
    closed = [one for one in follows.of(ClosedWait) if one.ask.position <= turn.position]
    turn.closed_waits = [closed_wait(one.ask, filled) for one in closed]
    if any(wait.was_open for wait in turn.closed_waits):
        turn.guard = mail_known
    turn.let_go = [one.path for one in follows.of(LetGo) if one.asked <= turn.position]


def identity_back(turn: Turn, one: TakenBack) -> tuple[int, UUID]:
    """The position that says so, and the id of the message or task that is taken back."""
    return one.position, message_id(turn.execution, turn.epoch, one.path, at=one.asked_at)


def closed_wait(ask: Ask, filled: Collection[str]) -> ClosedWaitRow:
    """A wait that has a row, since it was asked for before, and is over. `filled`: those that an event has met."""
    return ClosedWaitRow(ask.path, ask.args["type"], ask.args["key"], was_open=ask.path not in filled)


def new_waits(machine: Machine, *, position: int, last: int) -> list[NewWait]:
    """Waits for events that were asked after `position`, up to `last`, and are still open."""
    return [
        NewWait(ask.path, ask.args["type"], ask.args["key"])
        for _, ask in machine.open.values()
        if ask.is_event and position < ask.position <= last
    ]


def new_mutexes(machine: Machine, *, position: int, last: int) -> list[NewMutex]:
    """Mutexes that were asked for after `position`, up to `last`, and are still waited for."""
    return [
        NewMutex(ask.path, "flow" if ask.path == FLOW else "step", ask.args["key"])
        for _, ask in machine.open.values()
        if ask.kind == "mutex" and position < ask.position <= last
    ]


def identity_of(claim: Claim, machine: Machine) -> Identity:
    started = machine.started
    return Identity(
        tenant=claim.tenant,
        execution=claim.execution,
        epoch=claim.epoch,
        key=started.get("key"),
        traceparent=started.get("traceparent"),
        hops=started.get("hops", 0),
    )


def messages_of(
    asked: Sequence[Fact], identity: Identity, wire: Wire, bases: Mapping[int, str] = NONE
) -> list[NewMessage]:
    """The messages that the facts in `asked` ask for, in their order."""
    return [message_of(fact, within(identity, fact, bases), wire) for fact in asked if asks_for_message(fact)]


def events_of(
    facts: Sequence[Fact], identity: Identity, wire: Wire, bases: Mapping[int, str] = NONE
) -> list[NewEvent]:
    """The events that `facts` emit, in their order."""
    return [event_of(fact, within(identity, fact, bases), wire) for fact in facts if is_emitted(fact)]


def published_by(noted: Sequence[Fact]) -> list[NewAttribute]:
    """What the execution says about itself after `noted`, where they change it."""
    last: dict[str, Json] = {}
    for fact in noted:
        if fact.data.get("kind") == "publish":
            last |= fact.data["args"]
    return [NewAttribute(name, None if data is None else value_of(data)) for name, data in last.items()]


def tasks_of(asked: Sequence[Fact], identity: Identity, bases: Mapping[int, str] = NONE) -> list[NewTask]:
    """The tasks that the facts in `asked` ask for, in their order."""
    return [task_of(fact, within(identity, fact, bases)) for fact in asked if asks_for_task(fact)]


def within(identity: Identity, fact: Fact, bases: Mapping[int, str]) -> Identity:
    """`identity`, in the segment of the trace that `fact` is in."""
    return replace(identity, traceparent=bases[fact.position]) if fact.position in bases else identity


def is_emitted(fact: Fact) -> bool:
    """Whether a fact sends an event to whoever subscribes to its type."""
    return fact.kind == "noted" and fact.data.get("kind") == "emit"


def asks_for_message(fact: Fact) -> bool:
    """Whether an `asked` fact sends a command: a call, its probe, or an undo by a command."""
    return fact.data.get("kind") in LEAVING and "args" in fact.data and fact.data["args"]["do"] == "call"


def asks_for_task(fact: Fact) -> bool:
    """Whether an `asked` fact leaves work for a queue."""
    return fact.data.get("kind") == "task" and "args" in fact.data
