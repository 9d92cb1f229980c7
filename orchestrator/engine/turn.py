"""What an execution commits, from what its machine has said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from contracts.identifiers import message_id
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine, TakenBack
from orchestrator.core.status import TERMINAL, TRANSITIONS, Status
from orchestrator.engine.clock import Clock
from orchestrator.engine.inputs import Inputs
from orchestrator.engine.message import Identity, Wire, message_of
from orchestrator.store.commits import NewMessage, Turn
from orchestrator.store.executions import Claim

Json = Any

RESTING: Final = frozenset({*TERMINAL, Status.HELD, Status.PAUSED})
"""Statuses in which nobody owns an execution."""


def turn_of(
    claim: Claim,
    *,
    position: int,
    machine: Machine | None,
    facts: list[Fact],
    taken_back: Sequence[TakenBack],
    inputs: Inputs,
    loaded: int,
    before: Status,
    status: Status,
    release: bool,
    clock: Clock,
    wire: Wire,
) -> Turn:
    """The turn that takes the execution of `claim` from `position` and status `before` on by `facts`.

    `machine` is what said them; None when nothing but what the engine itself says is committed. `loaded` is the
    number of the last mail that was read into `inputs`.
    """
    assert status in TRANSITIONS[before], f"{claim.execution}: {before} to {status}"
    due = machine.next_due() if machine is not None else None
    asked = [fact for fact in facts if fact.kind == "asked"]
    leaves = any(asks_for_message(fact) for fact in asked)
    return Turn(
        tenant=claim.tenant,
        execution=claim.execution,
        fence=claim.fence,
        position=position,
        epoch=claim.epoch,
        facts=facts,
        mail=inputs.mail,
        orders=inputs.orders,
        status=str(status),
        undoing=machine is not None and bool(machine.undoing),
        release=release or status in RESTING,
        due=clock.now()
        if machine is not None and machine.runnable()
        else due[0]
        if due is not None
        else None,
        guard=loaded if inputs.guard else None,
        asks=bool(asked),
        messages=messages_of(asked, identity_of(claim, machine), wire) if leaves else [],
        taken_back=[
            (one.position, message_id(claim.execution, claim.epoch, one.path, at=one.asked_at))
            for one in taken_back
        ],
    )


def identity_of(claim: Claim, machine: Machine | None) -> Identity:
    started = machine.started if machine is not None else {}
    return Identity(
        tenant=claim.tenant,
        execution=claim.execution,
        epoch=claim.epoch,
        key=started.get("key"),
        traceparent=started.get("traceparent"),
    )


def messages_of(asked: Sequence[Fact], identity: Identity, wire: Wire) -> list[NewMessage]:
    """The messages that the facts in `asked` ask for, in their order."""
    return [message_of(fact, identity, wire) for fact in asked if asks_for_message(fact)]


def asks_for_message(fact: Fact) -> bool:
    """Whether an `asked` fact sends a command: a call, or an undo by a command."""
    return (
        fact.data.get("kind") in ("call", "undo")
        and "args" in fact.data
        and fact.data["args"]["do"] == "call"
    )
