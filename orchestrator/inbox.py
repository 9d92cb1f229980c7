"""What people do about what came and moved nothing: why, and letting in what was kept apart."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal, cast

from multidict import CIMultiDict

from contracts import strict_json
from contracts.envelope import decode_structured
from contracts.errors import Conflict, ContractViolation, LimitExceeded, NotFound, WaypostError, shown
from contracts.json_schema import Checker
from contracts.limits import CONTRACTS_MAX, IDENTITY_BYTES_MAX, SCHEMA_BYTES_MAX
from contracts.observer import Silent
from contracts.vault import Vault
from orchestrator.core.names import is_name
from orchestrator.registry import TENANT
from orchestrator.store import inbox as store
from orchestrator.store.database import Connection
from orchestrator.store.inbox import Apart, Near, Received
from receiver import senders, streams
from receiver.arrivals import Arrival, mail_of
from receiver.arrivals import fault_of as wrong_of
from receiver.inbox import post
from receiver.mapping import Unmapped
from receiver.quarantine import fault_of, told
from receiver.requests import Refusal, event_in
from receiver.streams import Stream

NEAR_MAX: Final = 5
"""Waits that are told of one event."""
Became = Literal["stored", "duplicate"]


class UnknownItem(NotFound):
    """Nothing that came has that number."""

    code = "unknown-item"

    def __init__(self, name: str) -> None:
        super().__init__(f"nothing in the inbox is named {shown(name)}; `waypost inbox list` shows what is")


class StillApart(Conflict):
    """What was kept apart cannot be let in, for the reason that it has now."""

    code = "still-apart"


class ContractInvalid(ContractViolation):
    """A contract cannot be registered."""

    code = "contract-invalid"
    http_status = 422


async def find(conn: Connection, name: str, *, tenant: int = TENANT) -> Apart | Received:
    """What has that name: a number, or `q` and a number. Raises UnknownItem."""
    digits = name.removeprefix("q")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise UnknownItem(name)
    number = int(digits)
    if name.startswith("q"):
        async with conn.transaction():
            found: Apart | Received | None = await store.read_apart(conn, number, tenant=tenant)
    else:
        found = await store.read_received(conn, number, tenant=tenant)
    if found is None:
        raise UnknownItem(name)
    return found


async def explain(
    conn: Connection, item: Apart | Received, *, now: datetime, tenant: int = TENANT
) -> list[str]:
    """Why it moved nothing, in sentences: the reason, and each wait that it nearly met with what differs."""
    if isinstance(item, Apart):
        return why_apart(item)
    if item.kind != "event":
        return why_unmatched(item)
    if item.ended:
        return [f"It came late: execution {each} had ended before it read it." for each in item.ended]
    if item.taken or item.had:
        return [f"Execution {each} has it." for each in item.had] or ["It started an execution."]
    near = await store.read_near(
        conn, tenant=tenant, type=item.type or "", key=item.key or "", limit=NEAR_MAX
    )
    over = item.shelf_until is not None and item.shelf_until <= now
    head = (
        f"Nobody waited for it until {item.shelf_until:%Y-%m-%d %H:%M} UTC; it is offered no more, but by redrive."
        if over and item.shelf_until
        else "Nobody has waited for it yet; it is kept for who will."
    )
    if not near:
        return [
            head,
            f"No execution waits for events of type {shown(item.type)}, or with key {shown(item.key)}.",
        ]
    return [head, *(differs(item, each) for each in near)]


def why_apart(item: Apart) -> list[str]:
    if item.released_at is not None:
        how = (
            "when its turn came" if item.released_by == streams.ITS_TURN else f"by {shown(item.released_by)}"
        )
        return [f"It was let in {how}, at {item.released_at:%Y-%m-%d %H:%M} UTC."]
    reasons = {
        "contract": "It breaks the contract of its type:",
        "mapping": "It is not as the settings of its sender say:",
        "expired": "It was over when it came:",
        "conflict": "Something else came first under its name:",
        "invalid": "It is no event, or none that its sender may say:",
        "ahead": "It waits for the event before it:",
        "superseded": "A newer one was let in before it came:",
    }
    lines = [f"- {line}" for line in item.detail.splitlines()]
    if item.reason == "ahead" and item.due_at is not None:
        lines.append(
            f"It is let in when that has come, and at {item.due_at:%Y-%m-%d %H:%M:%S} UTC in any case."
        )
    return [reasons[item.reason], *lines]


def why_unmatched(item: Received) -> list[str]:
    if item.ended:
        return [f"It came late: execution {each} had ended before it read it." for each in item.ended]
    if item.had:
        return [f"Execution {each} has it." for each in item.had]
    causation = decode_structured(item.body).extensions.get("causationid") if item.body else None
    return [f"It is a reply to message {shown(causation)}, and we never sent one of that id."]


def differs(item: Received, near: Near) -> str:
    """Which condition of a wait an event does not meet."""
    who = f"Execution {near.execution_id} waits at {shown(near.path)}"
    if near.type != item.type:
        return f"{who} for the same key, but for type {shown(near.type)}; this one is {shown(item.type)}."
    if near.key != item.key:
        return f"{who} for this type, but for key {shown(near.key)}; this one has {shown(item.key)}."
    if near.filled:
        return f"{who} for it, and has another event of this key already."
    return f"{who} for it since after this came, and is not of those that get what came before they began."


async def redrive(
    conn: Connection, vault: Vault, name: str, *, by: str, now: datetime | None = None, tenant: int = TENANT
) -> Became:
    """Let in what was kept apart, by the settings and contracts of now, and as if it had just come; offer an orphaned
    event again.

    Its stream is locked first, if it has one, then its row, before all that `post_mail` locks; nobody who holds any of
    that waits for them.

    What is too old is let in all the same: that is what a person decides. Raises UnknownItem; StillApart with the
    reason that it has now.
    """
    found = await find(conn, name, tenant=tenant)
    if isinstance(found, Received):
        return await offer(conn, found, now=now or datetime.now(UTC), tenant=tenant)
    number = int(name[1:])
    fault: tuple[str, str] | None = None
    async with conn.transaction():
        item = await taken_out(conn, found)
        if item.released_at is not None:
            return "duplicate"
        sender = await senders.read(conn, (item.tenant, item.sender), vault=vault, observer=Silent())
        if sender is None:
            raise StillApart(f"{name}: its sender {shown(item.sender)} is not registered any more")
        try:
            senders.check_settings(sender)
            envelope, kept = event_in(CIMultiDict(item.headers), item.body, sender)
            fault = fault_of(sender, envelope, now=(now or datetime.now(UTC)).timestamp(), late_too=True)
            mail = mail_of(Arrival.of(sender, item.webhook_id, envelope, kept))
        except Unmapped as error:
            fault = "mapping", told(error.problems)
        except (Refusal, WaypostError) as error:
            raise StillApart(f"{name}: {shown(str(error))}") from None
        else:
            if fault is None:
                [posted] = await post(conn, [mail])
                if posted.outcome in ("stored", "duplicate"):
                    await store.release(conn, number, by=by, tenant=tenant)
                    return "stored" if posted.outcome == "stored" else "duplicate"
                if wrong := wrong_of(posted.outcome):
                    raise StillApart(f"{name}: {shown(str(wrong))}")
                fault = (
                    "conflict",
                    f"id: expected a name that is free, found one of inbox row {posted.inbox_id}",
                )
        await store.blame(conn, number, reason=fault[0], detail=fault[1], tenant=tenant)
    raise StillApart(f"{name} stays where it is, {fault[0]}: {'; '.join(fault[1].splitlines())}")


async def taken_out(conn: Connection, found: Apart) -> Apart:
    """What was kept apart, locked; where it was in line, its turn has passed now."""
    stream = None if found.stream is None else Stream(found.tenant_id, found.sender, found.stream)
    if stream is not None:
        await streams.lock(conn, stream)
    item = await store.read_apart(conn, found.quarantine_id, tenant=found.tenant_id)
    assert item is not None, "rows of the quarantine stay"
    if stream is not None and item.due_at is not None:
        await streams.leave(conn, stream, item.sequence or "", item.quarantine_id)
    return item


async def offer(conn: Connection, event: Received, *, now: datetime, tenant: int) -> Became:
    async with conn.transaction():
        if await store.offer_again(conn, event, now=now, tenant=tenant):
            return "stored"
    raise StillApart(
        f"{event.inbox_id}: expected what was kept apart (q…) or an orphaned event, found mail, which nobody keeps"
        " from anyone"
    )


async def add_contract(
    conn: Connection,
    type: str,  # noqa: A002  # its name on the wire
    schema: Any,
    *,
    dataschema: str = "",
    tenant: int = TENANT,
) -> None:
    """Expect events of `type`, and of that `dataschema` if there is one, to have data that fits `schema`.

    Receivers know within seconds. Raises ContractInvalid, SchemaInvalid, LimitExceeded.
    """
    if not is_name(type, IDENTITY_BYTES_MAX):
        raise ContractInvalid(
            f"type {shown(type)}: expected 1 to {IDENTITY_BYTES_MAX} bytes of printable text"
        )
    Checker(schema)
    text = strict_json.encode(schema, what="schema", bytes_max=SCHEMA_BYTES_MAX)
    async with conn.transaction():
        await store.put_contract(conn, type, dataschema, text, tenant=tenant)
        if (count := len(await store.read_contracts(conn, tenant=tenant))) > CONTRACTS_MAX:
            raise LimitExceeded("contracts", count, CONTRACTS_MAX)


async def remove_contract(conn: Connection, type: str, *, dataschema: str = "", tenant: int = TENANT) -> None:  # noqa: A002  # as above
    if not await store.remove_contract(conn, type, dataschema, tenant=tenant):
        raise UnknownContract(type)


class UnknownContract(NotFound):
    """No contract is registered for that type."""

    code = "unknown-contract"

    def __init__(self, type: str) -> None:  # noqa: A002  # as above
        super().__init__(f"no contract of type {shown(type)}; `waypost contract list` shows them")


def document_in(found: Any, type: str | None) -> tuple[str, Any]:  # noqa: A002  # as above
    """Type and schema in a file: what `waypost contracts` wrote of an event, or a bare schema of that type."""
    if type is not None:
        return type, found
    document = cast("dict[str, Any]", found if isinstance(found, dict) else {})
    if document.get("kind") != "event" or not isinstance(document.get("type"), str):
        raise ContractInvalid(
            "contract: expected the file of an event by `waypost contracts`, or --type beside a schema"
        )
    return document["type"], document.get("data")
