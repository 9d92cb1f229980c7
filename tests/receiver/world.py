"""A receiver at work on a real database and a real port, and the senders that post to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID, uuid4

from psycopg import AsyncConnection, sql
from psycopg_pool import AsyncConnectionPool

from contracts.envelope import Envelope, encode_structured
from contracts.signature import Secret, sign
from contracts.vault import Vault, secret_context
from receiver.data import Fetch
from receiver.ingress import Receiver
from receiver.settings import ReceiverSettings
from tests.moments import Moments

Connection = AsyncConnection[Any]
Pool = AsyncConnectionPool[Any]

NOON: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
NOW: Final = int(NOON.timestamp())
VAULT: Final = Vault(bytes(range(32)))
SECRET: Final = Secret.of(b"the secret of payments, 24 bytes and more")
OTHER: Final = Secret.of(b"a secret that nobody has, also 24 bytes and more")
PATIENCE_SECONDS: Final = 30.0
VISIBLE: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: everything, and in parts."""

    raw: bytes

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1]) if self.raw else 0

    @property
    def head(self) -> str:
        return self.raw.partition(b"\r\n\r\n")[0].decode("latin-1")

    @property
    def headers(self) -> dict[str, str]:
        lines = (line.partition(":") for line in self.head.split("\r\n")[1:])
        return {name.lower(): value.strip() for name, _, value in lines}

    @property
    def json(self) -> Any:
        return json.loads(self.raw.partition(b"\r\n\r\n")[2])


@dataclass(slots=True)
class World:
    """A running receiver. Hints that it gave are in `hints`."""

    conn: Connection
    receiver: Receiver
    moments: Moments
    stop: asyncio.Event
    port: int = 0
    hints: list[str] = field(default_factory=list[str])

    async def send(self, request: bytes) -> Answer:
        """Send bytes as they are, and return all that comes back until the other side closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            async with asyncio.timeout(PATIENCE_SECONDS):
                return Answer(await reader.read())
        finally:
            writer.close()

    async def post(self, event: Mapping[str, Any] | bytes, **how: Any) -> Answer:
        return await self.send(request(event, **how))

    async def refused(self, sent: bytes) -> Answer:
        """Send, and check what holds for every refusal: the database is unchanged, and nothing is repeated.

        What says something else under a name that is taken is kept apart, where it changes nothing.
        """
        before = await dump(self.conn)

        answer = await self.send(sent)

        after = await dump(self.conn)
        if answer.status == 409:
            before["quarantine"] = after["quarantine"]
        assert after == before
        assert b"hostile" not in answer.raw
        assert len(answer.raw) < 600
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json["status"] == answer.status
        return answer


@asynccontextmanager
async def running(
    pool: Pool,
    conn: Connection,
    *,
    settings: ReceiverSettings | None = None,
    clock: Callable[[], int] = lambda: NOW,
    fetch: Fetch | None = None,
) -> AsyncGenerator[World]:
    """A receiver that listens until the block ends; its clock stands at noon, unless it has another."""
    moments, stop, hints = Moments(), asyncio.Event(), list[str]()
    receiver = Receiver(
        pool,
        vault=VAULT,
        settings=settings,
        observer=moments,
        hint=hints.append,
        clock=clock,
        fetch=fetch,
    )
    serving = asyncio.create_task(receiver.serve("127.0.0.1", 0, stop))
    try:
        started = await moments.until("receiver.started")
        port = started["port"]
        assert isinstance(port, int)
        yield World(conn, receiver, moments, stop, port, hints)
    finally:
        stop.set()
        await serving


def event(**changes: Any) -> dict[str, Any]:
    """An event of a third party; a change to None removes the attribute."""
    made = {
        "specversion": "1.0",
        "id": str(uuid4()),
        "source": "/payments",
        "type": "payout.made",
        "subject": "order-1042",
        "time": "2026-11-30T12:00:00Z",
        "data": {"amount": 4200},
        **changes,
    }
    return {name: value for name, value in made.items() if value is not None}


def reply(message_id: UUID | str, **changes: Any) -> dict[str, Any]:
    """The answer that a charge was made."""
    made: dict[str, Any] = {
        "type": "payment.charge.done",
        "causationid": str(message_id),
        "data": {"charge": "ch-1"},
    }
    return event(**made | changes)


def request(
    body: Mapping[str, Any] | bytes,
    *,
    path: str = "/events/default/payments",
    method: str = "POST",
    secret: Secret = SECRET,
    at: int = NOW,
    webhook_id: str | None = None,
    replace: Mapping[str, str | None] | None = None,
    more: Headers | None = None,
) -> bytes:
    """A signed request as bytes. `replace` changes headers, to None to leave one out; `more` come after them."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    message_id = webhook_id or f"msg_{hashlib.sha256(payload).hexdigest()[:20]}"
    headers: dict[str, str | None] = {
        "host": "receiver.test",
        "connection": "close",
        "content-type": "application/cloudevents+json",
        "content-length": str(len(payload)),
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": signature(secret, message_id, at, payload),
        **(replace or {}),
    }
    kept = [(name, value) for name, value in headers.items() if value is not None] + (more or [])
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in kept), "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + payload


def in_headers(
    event: Mapping[str, Any],
    *,
    body: bytes | None = None,
    content_type: str | None = "application/json",
    replace: Mapping[str, str | None] | None = None,
    more: Headers | None = None,
    **how: Any,
) -> bytes:
    """The signed request of `event` in the binary content mode; `body` instead of its data."""
    attributes = {name: str(value) for name, value in event.items() if name != "data"}
    said = {f"ce-{name}": quote(value, safe=VISIBLE) for name, value in attributes.items()}
    payload = json.dumps(event.get("data")).encode() if body is None else body
    return request(
        payload,
        replace={"content-type": content_type, **(replace or {})},
        more=[*said.items(), *(more or [])],
        **how,
    )


def signature(secret: Secret, message_id: str, at: int, payload: bytes) -> str:
    try:
        return sign([secret], message_id=message_id, timestamp=at, body=payload)
    except ValueError:
        return "v1,aG9zdGlsZQ=="  # an id that cannot be signed


async def add_sender(
    conn: Connection,
    name: str = "payments",
    *,
    tenant: int = 1,
    state: str = "enabled",
    secret: Secret = SECRET,
    key_id: str = "1",
    expires_at: datetime | None = None,
    binary_mode: bool = False,
) -> None:
    """A sender, or one more secret of it."""
    await conn.execute(
        """
        insert into waypost.sender (tenant_id, name, state, binary_mode)
        values (%s, %s, %s, %s)
            on conflict do nothing
        """,
        (tenant, name, state, binary_mode),
    )
    nonce = hashlib.sha256(f"{tenant}/{name}/{key_id}".encode()).digest()[:12]
    owner = secret_context(tenant=tenant, owner_kind="sender", owner_name=name, key_id=key_id)
    await conn.execute(
        """
        insert into waypost.secret
               (tenant_id, owner_kind, owner_name, key_id, nonce, ciphertext, expires_at)
        values (%s, 'sender', %s, %s, %s, %s, %s)
        """,
        (tenant, name, key_id, nonce, VAULT.seal(secret.key, nonce=nonce, associated=owner), expires_at),
    )


async def add_tenant(conn: Connection, tenant: int, name: str) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (%s, %s)", (tenant, name))


async def add_command(
    conn: Connection,
    *,
    tenant: int = 1,
    endpoint: str = "payments",
    replies_from: str | None = None,
    status: str = "open",
) -> tuple[UUID, UUID]:
    """An execution that sleeps and the command that it sent to `endpoint`: their ids."""
    execution_id, message_id = uuid4(), uuid4()
    await conn.execute(
        """
        insert into waypost.endpoint (tenant_id, name, url, replies_from)
        values (%s, %s, 'https://payments.test/', %s)
            on conflict do nothing
        """,
        (tenant, endpoint, replies_from),
    )
    await conn.execute(
        """
        insert into waypost.execution (tenant_id, execution_id, definition, status, events_after)
        values (%s, %s, 'order', %s, 0)
        """,
        (tenant, execution_id, status),
    )
    body = encode_structured(Envelope(id=str(message_id), source="/waypost", type="payment.charge"))
    await conn.execute(
        """
        insert into waypost.outbox (tenant_id, message_id, execution_id, epoch, path, endpoint, body, state)
        values (%s, %s, %s, 0, 'charge', %s, %s, 'delivered')
        """,
        (tenant, message_id, execution_id, endpoint, body),
    )
    return execution_id, message_id


async def add_wait(conn: Connection, *, type: str, key: str) -> UUID:  # noqa: A002  # the column's name
    """An execution that waits for an event."""
    execution_id, _ = await add_command(conn)
    await conn.execute(
        "insert into waypost.wait (tenant_id, execution_id, path, type, key) values (1, %s, 'paid', %s, %s)",
        (execution_id, type, key),
    )
    return execution_id


async def one(conn: Connection, query: Any, *parameters: object, **named: object) -> Any:
    """The single value, or row, that `query` gives."""
    row = await (await conn.execute(query, named or parameters)).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row


async def dump(conn: Connection) -> dict[str, list[str]]:
    """Every row of every table."""
    tables = await (
        await conn.execute("select tablename from pg_tables where schemaname = 'waypost' order by 1")
    ).fetchall()
    query = sql.SQL("select to_jsonb(t)::text from {} t order by 1")
    rows: dict[str, list[str]] = {}
    for (table,) in tables:
        found = await (await conn.execute(query.format(sql.Identifier("waypost", table)))).fetchall()
        rows[table] = [row for (row,) in found]
    return rows


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; for what no moment tells."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # nothing in the product says so
            await asyncio.sleep(0.01)
