"""Situations for the sentences: an execution that asked for things, as rows."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from orchestrator.store.kin import ChildRow
from orchestrator.store.mutexes import MutexRow
from orchestrator.store.reading import ExecutionRow, FactRow, MessageRow
from orchestrator.store.situation import AheadRow, Around, EndpointRow, Situation
from orchestrator.store.tasks import TaskRow
from orchestrator.store.tries import WorkerRow

NOW: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
ID: Final = "0193f000-0000-7000-8000-000000000001"
CHILD: Final = "0193f000-0000-8000-8000-00000000000c"
WORKER: Final = "0193f000-0000-7000-8000-00000000000a"

Said = tuple[str, str, dict[str, Any]]
"""A fact: kind, path, data."""


def at(seconds: float) -> datetime:
    """So many seconds after now; before it when negative."""
    return NOW + timedelta(seconds=seconds)


def asked_call(*, due: float = 300, kind: str = "call", path: str = "charge") -> Said:
    return (
        "asked",
        path,
        {
            "kind": kind, "name": "charge", "args": {"do": "call", "name": "payment.charge"},
            "due": at(due).isoformat(), "undo": None,
        },
    )  # fmt: skip


def asked_probe() -> Said:
    said: dict[str, Any] = {
        "kind": "probe", "name": "charge", "args": {"do": "call", "name": "payment.was-charged"},
        "due": at(900).isoformat(),
    }  # fmt: skip
    return ("asked", "charge/probe", said)


def asked_event(*, key: str = "order-7", due: float | None = None) -> Said:
    until = {} if due is None else {"due": at(due).isoformat()}
    args = {"type": "payment.succeeded", "key": key}
    return ("asked", "paid", {"kind": "event", "name": "paid", "args": args} | until)


def asked_person(*, due: float | None = None) -> Said:
    until = {} if due is None else {"due": at(due).isoformat()}
    args = {"subject": "spend", "who": ["group:finance", "ann"], "choices": ["approve", "reject"]}
    return ("asked", "spend/decision", {"kind": "decision", "name": "decision", "args": args} | until)


def asked_mutex(path: str = "pack/mutex", name: str = "pack") -> Said:
    return ("asked", path, {"kind": "mutex", "name": name, "args": {"key": "line-7"}})


OTHER: Final = "0193f000-0000-7000-8000-000000000002"


def mutex(
    path: str = "pack/mutex",
    *,
    of: str = ID,
    kind: str = "step",
    granted: float | None = None,
    status: str = "open",
    ahead: int = 0,
    waiting: int = 0,
) -> MutexRow:
    since = None if granted is None else at(granted)
    return MutexRow(kind, "line-7", path, of, "order", "1", status, at(-30), since, ahead, waiting)


def reminds(seconds: float) -> Said:
    asked = {"kind": "timer", "name": "remind", "args": {"reminds": "spend"}, "due": at(seconds).isoformat()}
    return ("asked", "spend/first.1/remind", asked)


def asked_child(*, due: float | None = None) -> Said:
    until = {} if due is None else {"due": at(due).isoformat()}
    args: dict[str, Any] = {"flow": "deliver", "data": {}, "key": None, "execution": CHILD}
    return ("asked", "deliver", {"kind": "child", "name": "deliver", "args": args} | until)


def child(state: str) -> ChildRow:
    return ChildRow(CHILD, "deliver", "1", None, "deliver", state)


def asked_step(kind: str = "step", path: str = "pack") -> Said:
    return ("asked", path, {"kind": kind, "name": "pack", "args": {"do": "step", "name": "shop:pack"}})


def attempted(number: int, next_at: float, path: str = "pack") -> Said:
    error = {"code": "raised", "detail": "ValueError: no box"}
    return ("attempted", path, {"attempt": number, "error": error, "next_at": at(next_at).isoformat()})


MESSAGE: Final = MessageRow(
    message_id="m", path="charge", endpoint="payments", state="due", attempts=0, reached=False, replied=False,
    due_at=at(-20), expires_at=at(300), lease_until=None, tried=None, outcome=None, http_status=None,
    error_code=None, tried_at=None, took=None,
)  # fmt: skip

TRIED: Final = replace(MESSAGE, attempts=2, tried=2, tried_at=at(-3), outcome="retry", http_status=503)


def asked_task() -> Said:
    asked = {
        "kind": "task",
        "name": "resize",
        "args": {"do": "task", "queue": "media", "name": "image.resize"},
    }
    return ("asked", "resize", asked | {"due": at(300).isoformat(), "undo": None})


TASK: Final = TaskRow(
    task_id="t", execution_id=ID, path="resize", queue="media", type="image.resize", key="k", attempt=1, priority=0,
    traceparent=None, state="due", owner=None, lease_until=None, available_at=at(-20), expires_at=at(300),
    began_at=None, ended_at=None, progress=None, code=None,
)  # fmt: skip

RUNNING: Final = replace(
    TASK, state="running", owner="mill:7", began_at=at(-9), lease_until=at(51), attempt=2
)

ENDPOINT: Final = EndpointRow("payments", "enabled", None, has_secret=True)

LIVING: Final = WorkerRow(WORKER, "ship-1", at(-600), at(25), None)


def case(
    *said: Said,
    status: str = "open",
    wake: float | None = 300,
    worker: WorkerRow | None = None,
    messages: list[MessageRow] | None = None,
    endpoints: list[EndpointRow] | None = None,
    tasks: list[TaskRow] | None = None,
    holders: int = 1,
    stuck: str | None = None,
    undoing: bool = False,
    deadline: float | None = None,
    children: list[ChildRow] | None = None,
    mutexes: list[MutexRow] | None = None,
    ahead: list[AheadRow] | None = None,
) -> Situation:
    """An execution that said `said` half a minute ago, after it was started."""
    facts: list[Said] = [("started", "", {"input": {}}), *said]
    over = status in ("completed", "compensated", "failed", "cancelled")
    return Situation(
        row=ExecutionRow(
            tenant_id=1, execution_id=ID, definition="order", version="1", business_key="order-7", state="",
            status=status, undoing=undoing, epoch=0, position=len(facts), wake_at=None if wake is None else at(wake),
            owner=None if worker is None else worker.worker_id, fence=1, mail_unread=0, created_at=at(-30),
            started_at=at(-30), finished_at=at(-5) if over else None,
            deadline_at=None if deadline is None else at(deadline),
        ),
        facts=[
            FactRow(number, kind, path, "program", 1, at(-30), at(-30), json.dumps(data))
            for number, (kind, path, data) in enumerate(facts, start=1)
        ],
        messages=messages or [],
        endpoints=[ENDPOINT] if endpoints is None else endpoints,
        worker=worker,
        around=Around(NOW, holders, stuck),
        children=children or [],
        mutexes=mutexes or [],
        tasks=tasks or [],
        ahead=ahead or [],
    )  # fmt: skip
