"""What a caller does with executions: start them, look at them, decide about those that are held."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID, uuid4, uuid5

from psycopg.errors import SerializationFailure

from contracts import strict_json, trace
from contracts.codec import Sealing
from contracts.errors import Conflict, ContractViolation, KeyConflict, UnknownExecution
from contracts.identifiers import uuid7
from contracts.limits import KEY_BYTES_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, SPAN_MAX
from orchestrator import approvals
from orchestrator.conditions import conditions
from orchestrator.core.ask import STEP_VERDICTS, UNDO_VERDICTS
from orchestrator.core.errors import STOPPING
from orchestrator.core.redaction import Redaction
from orchestrator.core.status import TERMINAL, Status
from orchestrator.flows import Flow
from orchestrator.objects.large import Large, put_new
from orchestrator.standing import ENDS, Standing, stands
from orchestrator.store import approvals as asked_for
from orchestrator.store import kin, reading, starts, terminating
from orchestrator.store.approvals import ApprovalRow
from orchestrator.store.attributes import Condition
from orchestrator.store.database import Connection
from orchestrator.store.kin import ChildRow
from orchestrator.store.reading import ExecutionRow, FactRow, MessageRow
from orchestrator.store.starts import NewExecution
from receiver import inbox
from receiver.inbox import MailItem

Json = Any
Verdict: TypeAlias = Literal["retry", "done", "skip", "not_done"]

CHILDREN_SHOWN_MAX: Final = 100
"""Children of one execution that are shown, those that have not ended first."""

WORDS_MAX: Final = 500
"""Characters of a reason that an operator gives."""


class NotHeld(Conflict):
    """The execution does not wait for this decision; nothing was changed."""

    code = "not-held"


class NotOpen(Conflict):
    """The execution cannot be cancelled; nothing was changed."""

    code = "not-open"


class OrderInvalid(ContractViolation):
    """An order lacks something, or says something that cannot be."""

    code = "order-invalid"


@dataclass(frozen=True, slots=True)
class Started:
    """An execution that was started, or that had been (`exists`) with this key and the same input."""

    execution_id: UUID
    outcome: Literal["started", "exists"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a held execution needs a person: at `path` an undo or a step; empty when its program was stopped."""

    code: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExecutionView:
    """One execution, whole: its row, its journal, its messages, its children (up to 100), and what holds it."""

    row: ExecutionRow
    facts: list[FactRow]
    messages: list[MessageRow]
    children: list[ChildRow] = field(default_factory=list[ChildRow])

    @property
    def held(self) -> Waiting | None:
        """Set while the execution is held."""
        if self.row.status != Status.HELD:
            return None
        fact = next((fact for fact in reversed(self.facts) if fact.kind == "held"), None)
        said: dict[str, Json] = json.loads(fact.payload or "{}") if fact is not None else {}
        return Waiting(said.get("code", ""), fact.path if fact is not None else "", said.get("reason", ""))

    @property
    def stands(self) -> list[Standing]:
        """What stands, as the end says it; before the end, what a person has decided to leave."""
        return stands(self.facts)

    @property
    def output(self) -> Json:
        """What the flow returned; None while it is under way, or when it failed."""
        last = self.facts[-1]
        return json.loads(last.payload or "{}").get("output") if last.kind == "finished" else None

    @property
    def error(self) -> dict[str, Json] | None:
        """The failure that ended the flow, or that somebody terminated it."""
        last = self.facts[-1]
        return json.loads(last.payload or "{}").get("error") if last.kind in ENDS else None

    @property
    def terminated(self) -> tuple[str, str] | None:
        """By whom and why it was ended without its program; None when it was not."""
        last = self.facts[-1]
        said: dict[str, Json] = json.loads(last.payload or "{}")
        return (said["by"], said["reason"]) if last.kind == "terminated" else None


class Client:
    """Over one connection (in autocommit). `hint` tells workers that there is work; without it they poll.
    `traced` says that there is a collector, which is told of ends that no worker sees.
    """

    def __init__(
        self,
        conn: Connection,
        *,
        tenant: int = 1,
        hint: Callable[[str], None] = lambda _: None,
        traced: bool = False,
    ) -> None:
        self._conn = conn
        self._tenant = tenant
        self._hint = hint
        self._traced = traced

    async def start(
        self,
        flow: Flow,
        input: Json,  # noqa: A002  # an execution's input, everywhere
        *,
        key: str | None = None,
        deadline: timedelta | None = None,
    ) -> Started:
        """Start one execution. A second start with the same `key` and input returns the first. It may take no longer
        than `deadline`, or what its flow says.

        Raises InputInvalid with every place that does not fit, NotEncodable or TooLarge, OrderInvalid for a key or a
        deadline that cannot be, and KeyConflict when the key belongs to an execution with another input. Then nothing
        was written. An input that goes by reference is put into the payload store first: StoreAway, StoreDenied.
        """
        return (await self.start_many(flow, [(input, key)], deadline=deadline))[0]

    async def start_many(
        self,
        flow: Flow,
        inputs: Sequence[tuple[Json, str | None]],
        *,
        deadline: timedelta | None = None,
    ) -> list[Started]:
        """Start an execution for each (input, key), all in one transaction; as `start`."""
        if deadline is not None and not timedelta(0) < deadline <= SPAN_MAX:
            raise OrderInvalid(f"deadline of {deadline}: expected more than 0 and at most ten years")
        new = [self._new(flow, given, key, deadline or flow.deadline) for given, key in inputs]
        if Large.kept is not None:
            new = await put_new(Large.kept, new)
        keyed = any(one.business_key is not None for one in new)
        async with self._conn.transaction() if keyed else contextlib.nullcontext():
            outcomes = await starts.start(self._conn, new)
            while any(outcome == "again" for outcome, _ in outcomes):
                outcomes = await starts.start(self._conn, new)
            for (outcome, execution), one in zip(outcomes, new, strict=True):
                if outcome == "conflict":
                    raise KeyConflict(flow.name, one.business_key or "", UUID(execution))
        self._hint("execution")
        return [Started(UUID(e), "started" if o == "started" else "exists") for o, e in outcomes]

    def _new(
        self,
        flow: Flow,
        input: Json,  # noqa: A002  # an execution's input, everywhere
        key: str | None,
        deadline: timedelta | None,
    ) -> NewExecution:
        if key is not None and not (
            0 < len(key.encode("utf-8", "replace")) <= KEY_BYTES_MAX and key.isprintable()
        ):
            raise OrderInvalid(f"key {key[:80]!r}: expected 1 to {KEY_BYTES_MAX} bytes of printable text")
        checked = flow.checked(input)
        text = strict_json.encode(checked, what=f"input of flow {flow.name}", bytes_max=Large.bytes_max())
        chance = os.urandom(18)
        execution = str(uuid7(at=datetime.now(UTC), chance=chance[:10]))
        traceparent = trace.root(execution)
        started = {
            "input": checked,
            "definition": flow.name,
            "version": flow.version,
            "seed": chance[10:].hex(),
            "key": key,
            "traceparent": traceparent,
            **({"sensitive": sensitive} if (sensitive := flow.sensitive) else {}),
        }
        return NewExecution(
            tenant=self._tenant,
            execution=execution,
            definition=flow.name,
            version=flow.version,
            business_key=key,
            digest=hashlib.sha256(text.encode()).digest(),
            started=strict_json.encode(started, what="started"),
            traceparent=traceparent,
            deadline=deadline,
        )

    async def show(self, execution_id: UUID | str) -> ExecutionView:
        """An output that is in the payload store is got from there; else facts name what is. Raises UnknownExecution,
        ObjectGone, StoreAway, PayloadKeyMissing, PayloadUnreadable.
        """
        view = await self._view(execution_id)
        last = view.facts[-1:]
        facts = [*view.facts[:-1], *[await reading.whole(one, tenant=self._tenant) for one in last]]
        return replace(view, facts=facts)

    async def _view(self, execution_id: UUID | str) -> ExecutionView:
        """Raises UnknownExecution."""
        execution = _uuid(execution_id)
        row = await reading.execution(self._conn, execution, tenant=self._tenant)
        if row is None:
            raise UnknownExecution(execution_id)
        facts = await reading.facts(self._conn, execution, tenant=self._tenant)
        messages = await reading.messages(self._conn, execution, tenant=self._tenant)
        children = await kin.children(self._conn, execution, tenant=self._tenant, limit=CHILDREN_SHOWN_MAX)
        return ExecutionView(row, facts, messages, children)

    async def shown(self, execution_id: UUID | str) -> ExecutionView:
        """As `show`, for people: REDACTED stands for what is Sensitive. Raises UnknownExecution."""
        view = await self._view(execution_id)
        by = await reading.redaction(self._conn, view.row.execution_id, view.facts, tenant=self._tenant)
        return replace(view, facts=reading.shown(view.facts, by))

    async def list(
        self,
        *,
        states: Sequence[str] | None = None,
        flow: str | None = None,
        key: str | None = None,
        where: Sequence[Condition | str] = (),
        limit: int = 50,
        parent: UUID | str | None = None,
    ) -> list[ExecutionRow]:
        """The newest executions first. `states` are stored statuses, or ready, running and waiting; `where` is about
        what they have published, such as `amount>=100`, and all of it has to be so; `parent` is whose children are
        wanted.

        Raises ConditionInvalid.
        """
        return await reading.newest(
            self._conn,
            tenant=self._tenant,
            states=states,
            flow=flow,
            key=key,
            limit=limit,
            where=conditions(where),
            parent=None if parent is None else _uuid(parent),
        )

    async def wait(self, execution_id: UUID | str, *, seconds: float) -> ExecutionView:
        """Until it is finished or held. Raises TimeoutError; UnknownExecution, and what `show` raises."""
        await self.until_over(execution_id, seconds=seconds)
        return await self.show(execution_id)

    async def until_over(self, execution_id: UUID | str, *, seconds: float) -> None:
        """Until it is finished or held. Raises TimeoutError; UnknownExecution."""
        async with asyncio.timeout(seconds):
            while True:
                row = await reading.execution(self._conn, _uuid(execution_id), tenant=self._tenant)
                if row is None:
                    raise UnknownExecution(execution_id)
                if row.status in {*TERMINAL, Status.HELD}:
                    return
                await asyncio.sleep(0.1)

    async def resume(self, execution_id: UUID | str, *, by: str, reason: str) -> None:
        """Let an execution go on whose program was stopped (a bug, a changed flow), where it was stopped.

        Raises NotHeld when it is not stopped, UnknownExecution, OrderInvalid.
        """
        view = await self._view(execution_id)
        held = view.held
        if held is None:
            raise NotHeld(f"execution {execution_id} is {view.row.state}; only a held one can be resumed")
        if held.code not in STOPPING:
            raise NotHeld(f"execution {execution_id} waits for a decision about {held.path}: resolve that")
        await self._order(view, {"order": "resume"}, path=None, by=by, reason=reason, once=True)

    async def cancel(self, execution_id: UUID | str, *, by: str, reason: str, undo: bool = True) -> None:
        """Ask an execution to end. From then on no ordinary step begins; what runs is withdrawn, and what was done is
        undone, unless not `undo`: then it stands, and is listed. While it undoes, it goes on undoing.

        Raises NotOpen when it is at an end, or when its program is stopped; UnknownExecution, OrderInvalid.
        """
        view = await self._view(execution_id)
        if view.row.status in TERMINAL:
            raise NotOpen(f"execution {execution_id} is {view.row.status}: there is nothing to cancel")
        if view.held is not None and view.held.code in STOPPING:
            raise NotOpen(
                f"execution {execution_id} is stopped ({view.held.code}), and only a program that runs can be "
                f"cancelled: mend that, resume it, then cancel it"
            )
        await self._order(view, {"order": "cancel", "undo": undo}, path=None, by=by, reason=reason)

    async def resolve(
        self,
        execution_id: UUID | str,
        path: str,
        verdict: Verdict,
        *,
        by: str,
        reason: str,
        value: Json = None,
    ) -> None:
        """Decide about the undo or the step at `path` that holds an execution.

        An undo: `retry`, `done` (it counts as undone) or `skip` (what was done stands). A step whose outcome
        is unknown: `done` with its reply as `value`, `not_done`, or `skip` (the flow gets OutcomeUnknown).
        Raises NotHeld when this is not what holds it, UnknownExecution, OrderInvalid.
        """
        view = await self._view(execution_id)
        held = view.held
        if held is None or held.path != path or held.code in STOPPING:
            waits = "waits for no decision" if held is None else f"waits at {held.path or 'its program'}"
            raise NotHeld(f"execution {execution_id} {waits}, not at {path!r}")
        allowed = STEP_VERDICTS if held.code == "unknown-outcome" else UNDO_VERDICTS
        if verdict not in allowed:
            raise OrderInvalid(f"verdict {verdict!r} at {path}: expected one of {', '.join(sorted(allowed))}")
        strict_json.encode(value, what="value", bytes_max=PAYLOAD_BYTES_MAX)
        order = {"order": "resolve", "verdict": verdict, "value": value}
        await self._order(view, order, path=path, by=by, reason=reason, once=True)

    async def terminate(self, execution_id: UUID | str, *, by: str, reason: str) -> list[str]:
        """End an execution at once and without its program, whatever its state: nothing more is undone, what has not
        left never will, and its status is `failed`. Tells the paths of what stands: what was done, or may have been.

        Said again by the same name for the same reason, it is the same order. Raises NotOpen when it has ended
        otherwise, UnknownExecution, OrderInvalid.
        """
        words("name", by, NAME_BYTES_MAX)
        words("reason", reason)
        execution = _uuid(execution_id)
        while True:
            try:
                done = await terminating.terminate(
                    self._conn, execution, tenant=self._tenant, by=by, reason=reason, traced=self._traced
                )
                break
            except SerializationFailure:  # it registered a wait in the very moment
                continue
        if done.outcome == "terminated":
            return done.stands
        view = await self._view(execution)
        if view.terminated != (by, reason):
            raise NotOpen(f"execution {execution} is {view.row.status}: there is nothing to terminate")
        return [one.path for one in view.stands]

    async def approvals(self, *, flow: str | None = None, limit: int = 50) -> list[ApprovalRow]:
        """What waits for a person to decide, the longest first."""
        found = await asked_for.waiting(self._conn, tenant=self._tenant, flow=flow, limit=limit)
        return found if Sealing.codec is None else [await self._with_show(row) for row in found]

    async def _with_show(self, row: ApprovalRow) -> ApprovalRow:
        """`row` with what its request shows: the database cannot read that in a sealed journal."""
        for fact in await reading.facts(self._conn, row.execution_id, tenant=self._tenant):
            if fact.kind == "noted" and fact.path == f"{row.path.rpartition('/')[0]}/request":
                said: Json = json.loads(fact.payload or "{}")
                return replace(row, show=said.get("args", {}).get("show"))
        return row

    async def approvals_shown(self, *, flow: str | None = None, limit: int = 50) -> list[ApprovalRow]:
        """As `approvals`, for people: what is Sensitive in their executions does not stand in their texts either."""
        rows = await self.approvals(flow=flow, limit=limit)
        by: dict[str, Redaction] = {}
        for execution in {row.execution_id for row in rows}:
            facts = await reading.facts(self._conn, execution, tenant=self._tenant)
            by[execution] = await reading.redaction(self._conn, execution, facts, tenant=self._tenant)
        return [asked_for.shown(row, by[row.execution_id].text) for row in rows]

    async def decide(
        self, execution_id: UUID | str, subject: str, choice: str, *, by: str, reason: str = ""
    ) -> None:
        """Decide about the approval `subject` (or its path) that an execution waits for. The first decision counts;
        said again by the same name, it is the same.

        `by` is who decides, and is trusted. Raises UnknownExecution; UnknownSubject; ChoiceInvalid for what is not
        offered; AlreadyDecided, which says by whom; NotWaiting when it expired, was withdrawn, or the execution is
        over.
        """
        words("name", by, NAME_BYTES_MAX)
        if reason:
            words("reason", reason)
        execution = _uuid(execution_id)
        row = await reading.execution(self._conn, execution, tenant=self._tenant)
        if row is None:
            raise UnknownExecution(execution_id)
        asked = await asked_for.of(self._conn, execution, tenant=self._tenant)
        found = approvals.meant(asked, subject, choice, by=by, execution=execution, status=row.status)
        if found is not None:
            await self._decide(row, found, choice, by, reason)

    async def _decide(self, row: ExecutionRow, found: ApprovalRow, choice: str, by: str, reason: str) -> None:
        """The order is named by its approval, so of two decisions the database stores the first."""
        order = {"order": "decide", "choice": choice, "by": by, "reason": reason}
        item = MailItem(
            kind="order",
            tenant=self._tenant,
            sender="waypost",
            source="waypost:operator",
            event_id=str(uuid5(UUID(row.execution_id), f"decision {row.epoch} {found.path}")),
            digest=hashlib.sha256(strict_json.encode([choice, by], what="decision").encode()).digest(),
            data=strict_json.encode(order, what="order"),
            execution=UUID(row.execution_id),
            epoch=row.epoch,
            path=found.path,
        )
        [posted] = await inbox.post(self._conn, [item])
        if posted.outcome == "conflict" and posted.inbox_id is not None:
            raise approvals.AlreadyDecided(
                found.subject, *await asked_for.decision(self._conn, posted.inbox_id)
            )
        self._hint("execution")

    async def _order(
        self,
        view: ExecutionView,
        order: dict[str, Json],
        *,
        path: str | None,
        by: str,
        reason: str,
        once: bool = False,
    ) -> None:
        """Post an order. One that is for `once` is about what holds the execution now: said again, because its answer
        was lost, it is the same order.
        """
        words("name", by, NAME_BYTES_MAX)
        words("reason", reason)
        said = strict_json.encode(order | {"by": by, "reason": reason}, what="order")
        item = MailItem(
            kind="order",
            tenant=self._tenant,
            sender="waypost",
            source="waypost:operator",
            event_id=str(uuid5(UUID(view.row.execution_id), f"{held_at(view)} {said}") if once else uuid4()),
            digest=hashlib.sha256(said.encode()).digest(),
            data=said,
            execution=UUID(view.row.execution_id),
            epoch=view.row.epoch,
            path=path,
        )
        await inbox.post(self._conn, [item])
        self._hint("execution")


def words(what: str, text: str, bytes_max: int | None = None) -> None:
    """Raises OrderInvalid for a name or a reason that the journal cannot keep."""
    fits = len(text) <= WORDS_MAX if bytes_max is None else len(text.encode("utf-8", "replace")) <= bytes_max
    if not text.strip() or not fits or not text.isprintable():
        most = (
            f"{WORDS_MAX} printable characters"
            if bytes_max is None
            else f"{bytes_max} bytes of printable text"
        )
        raise OrderInvalid(f"operator's {what} {text[:80]!r}: expected 1 to {most}")


def held_at(view: ExecutionView) -> int:
    """The position of the fact that says what holds the execution; 0 when there is none."""
    return next((fact.position for fact in reversed(view.facts) if fact.kind == "held"), 0)


def _uuid(text: UUID | str) -> str:
    """Raises UnknownExecution for what is no UUID: no execution has that name."""
    try:
        return str(UUID(str(text)))
    except ValueError:
        raise UnknownExecution(str(text)) from None
