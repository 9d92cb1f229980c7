"""What an execution commits, from what its machine has said."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from contracts.identifiers import message_id
from orchestrator.core.attributes import value_of
from orchestrator.core.fact import Fact
from orchestrator.core.journal import TakenBack
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import FLOW
from orchestrator.core.status import TERMINAL, TRANSITIONS, Status
from orchestrator.engine.clock import Clock
from orchestrator.engine.families import family_of
from orchestrator.engine.inputs import Inputs
from orchestrator.engine.message import Identity, Wire, asked_again, event_of, message_of, task_of
from orchestrator.store.commits import (
    ClosedWait,
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

RESTING: Final = frozenset({*TERMINAL, Status.HELD, Status.PAUSED})
"""Statuses in which nobody owns an execution."""


def turn_of(
    claim: Claim,
    *,
    position: int,
    machine: Machine,
    facts: list[Fact],
    taken_back: Sequence[TakenBack],
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
    due = machine.next_due()
    asked = [fact for fact in facts if fact.kind == "asked"]
    if machine.sent_again:
        again = [one for one in machine.sent_again if one.position <= position + len(facts)]
        asked = sorted([*asked, *map(asked_again, again)], key=lambda fact: fact.position)
    left = [one for one in machine.left_children if one.position <= position + len(facts)]
    family = family_of(claim, machine, facts, left, bases)
    leaves = any(asks_for_message(fact) for fact in asked)
    noted = [fact for fact in facts if fact.kind == "noted"]
    emits = any(is_emitted(fact) for fact in noted)
    tasks = any(asks_for_task(fact) for fact in asked)
    back = [
        (one.task, one.position, message_id(claim.execution, claim.epoch, one.path, at=one.asked_at))
        for one in taken_back
        if one.position <= position + len(facts)
    ]
    closed = closed_waits(machine, position=position, last=position + len(facts), filled=inputs.filled)
    return Turn(
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
        due=clock.now() if machine.runnable() or machine.continues else due[0] if due is not None else None,
        guard=mail_known if inputs.guard or any(wait.was_open for wait in closed) else None,
        asks=bool(asked or family.children),
        events=events_of(noted, identity_of(claim, machine), wire, bases) if emits else [],
        attributes=published_by(noted) if noted else [],
        messages=messages_of(asked, identity_of(claim, machine), wire, bases) if leaves else [],
        taken_back=[(at, identity) for is_task, at, identity in back if not is_task],
        tasks=tasks_of(asked, identity_of(claim, machine), bases) if tasks else [],
        tasks_back=[(at, identity) for is_task, at, identity in back if is_task],
        waits=new_waits(machine, position=position, last=position + len(facts)) if asked else [],
        closed_waits=closed,
        family=family,
        mutexes=new_mutexes(machine, position=position, last=position + len(facts)) if asked else [],
        let_go=[
            one.path
            for one in machine.let_go
            if one.asked <= position and one.position <= position + len(facts)
        ],
    )


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


def closed_waits(machine: Machine, *, position: int, last: int, filled: Collection[str]) -> list[ClosedWait]:
    """Waits that have a row, since they were asked up to `position`, and that facts up to `last` end."""
    return [
        ClosedWait(
            one.ask.path, one.ask.args["type"], one.ask.args["key"], was_open=one.ask.path not in filled
        )
        for one in machine.closed_waits
        if one.ask.position <= position and one.position <= last
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
    return (
        fact.data.get("kind") in ("call", "probe", "undo")
        and "args" in fact.data
        and fact.data["args"]["do"] == "call"
    )


def asks_for_task(fact: Fact) -> bool:
    """Whether an `asked` fact leaves work for a queue."""
    return fact.data.get("kind") == "task" and "args" in fact.data
