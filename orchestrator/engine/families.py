"""What a turn does in other executions, from its facts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from contracts import strict_json, trace
from contracts.identifiers import execution_key
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact
from orchestrator.core.follows import LeftChild
from orchestrator.core.machine import Machine
from orchestrator.core.segments import anchor_of
from orchestrator.core.status import Status
from orchestrator.store.commits import NO_FAMILY
from orchestrator.store.executions import Claim
from orchestrator.store.families import Family, KinMail, NewChild

Json = Any


def family_of(
    claim: Claim, machine: Machine, facts: Sequence[Fact], left: Sequence[LeftChild], bases: Mapping[int, str]
) -> Family:
    """What `facts` begin, whom they tell to end (`left`), and whom that they have ended. `bases` has the traceparent of
    the segment of each fact, where a trace has any.
    """
    begun = [fact for fact in facts if begins(fact)]
    ends = bool(facts) and facts[-1].kind == "finished" and "parent" in machine.started
    ends = ends and facts[-1].data["kind"] != "continued"
    if not begun and not left and not ends:
        return NO_FAMILY
    children = [new_child(fact, claim, machine, bases) for fact in begun]
    mail = [to_end(one, claim.execution, facts[one.position - facts[0].position]) for one in left]
    if ends:
        mail.append(ended(facts[-1], claim.execution, machine.started["parent"]))
    return Family(children, mail)


def begins(fact: Fact) -> bool:
    """Whether a fact begins another execution: a child, or one that is only started."""
    kind = fact.data.get("kind")
    return (kind == "child" and fact.kind == "asked" and "args" in fact.data) or (
        kind == "start" and fact.kind == "noted"
    )


def new_child(fact: Fact, claim: Claim, machine: Machine, bases: Mapping[int, str]) -> NewChild:
    """The execution that `fact` begins. A child goes on in the trace of its parent, what is only started in its own."""
    args: dict[str, Json] = fact.data["args"]
    is_child = fact.kind == "asked"
    asker = execution_key(claim.execution, claim.epoch, fact.path)
    base = bases.get(fact.position) or anchor_of(machine.started.get("traceparent"), claim.execution)
    traceparent = trace.child(base, f"{asker}/child") if is_child else trace.root(args["execution"])
    by = {"execution": claim.execution, "epoch": claim.epoch, "path": fact.path}
    started: dict[str, Json] = {
        "input": args["data"],
        "definition": args["flow"],
        "seed": hashlib.sha256(f"seed/{asker}".encode()).hexdigest()[:16],
        "key": args["key"],
        "traceparent": traceparent,
        **({"hops": machine.started["hops"]} if "hops" in machine.started else {}),
    }
    if is_child:
        span = trace.child(base, f"{asker}/wait")
        root = str(machine.started.get("root") or claim.execution)
        depth = int(machine.started.get("depth", 0)) + 1
        started |= {"parent": by | {"span": span}, "root": root, "depth": depth}
        if machine.mutexes.under_mutex:
            started["under_mutex"] = True
    else:
        root = None
        started["starter"] = by | {"span": base}
    return NewChild(
        position=fact.position,
        path=fact.path,
        execution=args["execution"],
        flow=args["flow"],
        business_key=args["key"],
        digest=hashlib.sha256(strict_json.encode(args["data"], what="input").encode()).digest(),
        started=strict_json.encode(started, what="started"),
        traceparent=traceparent,
        root=root,
    )


def to_end(child: LeftChild, parent: str, fact: Fact) -> KinMail:
    """The order to end, for a child that nobody waits for any more or whose time is over."""
    why = "its parent waits for it no more" if fact.kind == "withdrawn" else "its parent gave it no more time"
    order = {"order": "cancel", "undo": True, "by": f"execution {parent}", "reason": why}
    event = f"{child.execution}/cancel"
    return KinMail(fact.position, "order", event, child.execution, strict_json.encode(order, what="order"))


def ended(fact: Fact, execution: str, parent: dict[str, Json]) -> KinMail:
    """What the parent learns of the end of a child."""
    said = fact.data
    outcome: dict[str, Json] = {"execution": execution}
    if said["kind"] == Status.COMPLETED:
        outcome |= {"outcome": "done", "value": said["output"]}
    else:
        outcome |= {"outcome": "child_failed", "error": failure(said)}
    return KinMail(
        fact.position,
        "child",
        f"{execution}/ended",
        parent["execution"],
        strict_json.encode(outcome, what="the end of a child"),
        parent["epoch"],
        parent["path"],
    )


def failure(said: dict[str, Json]) -> dict[str, Json]:
    """How a child ended otherwise than well: its status, code and detail, and its own error, if it has one."""
    status, error = said["kind"], error_in(said)
    if not error:
        return {"status": status, "code": status, "detail": said.get("reason", "")}
    return {"status": status, "code": error.get("code"), "detail": error.get("detail"), "error": error}
