"""The orders of the demo, watched in the database and told while they happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from contracts.errors import WaypostError
from orchestrator.cli.local import Progress
from orchestrator.cli.output import plain, say, table
from orchestrator.client import Client, ExecutionView
from orchestrator.core.status import Status
from orchestrator.flows import Flow
from orchestrator.store.database import Connection
from orchestrator.store.reading import FactRow
from orchestrator.store.tries import TryRow, tries, workers

LOOK_SECONDS: Final = 0.05  # between two looks into the database
TENANT: Final = 1


@dataclass(slots=True)
class Order:
    """An order of the demo, and how it should end."""

    id: str
    story: str
    expected: Status
    card: str
    execution: UUID | None = None
    told: set[str] = field(default_factory=set[str])

    def input(self) -> dict[str, Any]:
        lines = [{"sku": "lamp", "count": 1}]
        return {"id": self.id, "customer": "ada", "total": 4200, "card": self.card, "lines": lines}


class DemoFailed(WaypostError):
    """An order did not end as it should."""

    code = "demo-failed"


class Stage:
    """Starts orders and tells what the database says about them."""

    def __init__(self, conn: Connection, client: Client, flow: Flow, progress: Progress) -> None:
        self._conn = conn
        self._client = client
        self._flow = flow
        self._progress = progress

    async def start(self, order: Order) -> None:
        started = await self._client.start(self._flow, order.input(), key=order.id)
        order.execution = started.execution_id
        self._tell(order, f"started: {order.story}")

    async def until(
        self, orders: Sequence[Order], come: Callable[[Sequence[ExecutionView]], bool]
    ) -> list[ExecutionView]:
        """Look, and tell what is new, until `come` says that it has come."""
        while True:
            views = [await self._look(order) for order in orders]
            if come(views):
                return views
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, order: Order) -> ExecutionView:
        assert order.execution is not None, "it was started"
        # Tries first: what a fact says of a message is told after what the relay got for it.
        tried = await tries(self._conn, str(order.execution), tenant=TENANT)
        view = await self._client.shown(order.execution)
        news = [(f"{one.message_id}/{one.attempt}", self._about_try(one)) for one in tried]
        news += [(str(fact.position), self._about_fact(fact)) for fact in view.facts]
        for name, text in news:
            if name not in order.told:
                order.told.add(name)
                if text:
                    self._tell(order, text)
        return view

    def _about_try(self, one: TryRow) -> str:
        if one.status is not None and one.status < 300:
            return ""
        return f"{one.path} {self._progress.bad} try {one.attempt}: {one.status or one.error_code}"

    def _about_fact(self, fact: FactRow) -> str:
        said: dict[str, Any] = json.loads(fact.payload or "{}")
        error: dict[str, Any] = said.get("error") or {}
        match fact.kind, said.get("outcome"):
            case "ended", "done":
                return f"{fact.path} {self._progress.good}"
            case "ended", outcome:
                return (
                    f"{fact.path} {self._progress.bad} {outcome}: {error.get('code')}, {error.get('detail')}"
                )
            case "orphaned", _:
                return "taken over from a dead worker"
            case "finished", _:
                return f"{said.get('kind')}"
            case _:
                return ""

    def _tell(self, order: Order, text: str) -> None:
        self._progress.line(f"{self._progress.seconds:6.2f} s  {order.id}  {plain(text)}")

    async def burial(self) -> str:
        """When a dead worker was found out, once it is."""
        while True:
            for worker in await workers(self._conn):
                if worker.dead_at is not None:
                    return f"worker {worker.worker_id} was found dead at {worker.dead_at:%H:%M:%S} UTC"
            await asyncio.sleep(LOOK_SECONDS)

    async def summary(self, orders: Sequence[Order]) -> None:
        """How all ended, as the database has it. Raises DemoFailed when one ended otherwise than it should."""
        views = [await self._look(order) for order in orders]
        rows = [
            (order.id, order.story, view.row.status, steps(view), f"{took(view):.1f} s")
            for order, view in zip(orders, views, strict=True)
        ]
        say(table(("ORDER", "STORY", "ENDED", "STEPS", "TOOK"), rows))
        wrong = [
            f"{order.id}: expected {order.expected}, found {view.row.status}"
            for order, view in zip(orders, views, strict=True)
            if view.row.status != order.expected
        ]
        if wrong:
            raise DemoFailed("; ".join(wrong))


def steps(view: ExecutionView) -> str:
    """The paths that ended, in order, with what became of those that were not done."""
    found: list[str] = []
    for fact in view.facts:
        if fact.kind == "ended":
            outcome = json.loads(fact.payload or "{}").get("outcome")
            found.append(fact.path if outcome == "done" else f"{fact.path} ({outcome})")
    return " → ".join(found)


def took(view: ExecutionView) -> float:
    ended = view.row.finished_at or view.facts[-1].recorded_at
    return (ended - view.row.created_at).total_seconds()
