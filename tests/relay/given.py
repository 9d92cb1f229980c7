"""Rows that the relay's tests begin with, and an observer that they wait for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import Any, Final
from uuid import UUID, uuid4

from aiohttp.abc import AbstractResolver, ResolveResult
from psycopg import AsyncConnection, sql

from contracts.signature import Secret
from contracts.vault import Vault, secret_context
from relay.settings import RelaySettings

Connection = AsyncConnection[Any]

NOON: Final = datetime(2020, 6, 1, 12, 0, tzinfo=UTC)  # past, so that a relay at work finds it due
NEVER: Final = datetime(2100, 1, 1, tzinfo=UTC)
VAULT: Final = Vault(bytes(range(32)))
SECRET: Final = Secret.of(b"a secret of twenty-four bytes, and more")
LOOPBACK: Final = ip_network("127.0.0.0/8")
HERE: Final = RelaySettings(allow=(LOOPBACK,))

PATIENCE: Final = 30.0  # seconds that something may take at most before a test gives up


def body_of(message_id: UUID, execution_id: UUID, **attributes: object) -> bytes:
    event: dict[str, object] = {
        "specversion": "1.0",
        "id": str(message_id),
        "source": f"/waypost/executions/{execution_id}",
        "type": "payment.charge",
        "idempotencykey": f"{execution_id}/0/payment.charge",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "data": {"order": "ordre-é-1042"},
        **attributes,
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


async def execution(conn: Connection) -> UUID:
    """An open execution that waits for mail."""
    execution_id = uuid4()
    await conn.execute(
        """
        insert into waypost.execution (tenant_id, execution_id, definition, events_after)
        values (1, %s, 'order', 0)
        """,
        (execution_id,),
    )
    return execution_id


async def message(
    conn: Connection,
    execution_id: UUID,
    *,
    endpoint: str = "payments",
    at: datetime = NOON,
    expires_at: datetime | None = NEVER,
    at_most_once: bool = False,
    body: bytes | None = None,
) -> UUID:
    """A command that is due at `at`."""
    message_id = uuid4()
    if body is None:
        body = body_of(message_id, execution_id)
    await conn.execute(
        """
        insert into waypost.outbox
               (tenant_id, message_id, execution_id, epoch, path, endpoint, body,
                due_at, expires_at, at_most_once)
        values (1, %s, %s, 0, 'payment.charge', %s, %s, %s, %s, %s)
        """,
        (message_id, execution_id, endpoint, body, at, expires_at, at_most_once),
    )
    return message_id


async def endpoint(
    conn: Connection,
    url: str,
    *,
    name: str = "payments",
    secret: Secret | None = SECRET,
    within: timedelta = timedelta(seconds=15),
) -> None:
    await conn.execute(
        "insert into waypost.endpoint (tenant_id, name, url, timeout) values (1, %s, %s, %s)",
        (name, url, within),
    )
    if secret is not None:
        await add_secret(conn, secret, name=name)


async def add_secret(
    conn: Connection,
    secret: Secret,
    *,
    name: str = "payments",
    key_id: str = "first",
    created_at: datetime = NOON,
    expires_at: datetime | None = None,
    vault: Vault = VAULT,
) -> None:
    nonce = key_id.encode().ljust(12)[:12]
    context = secret_context(tenant=1, owner_kind="endpoint", owner_name=name, key_id=key_id)
    await conn.execute(
        """
        insert into waypost.secret
               (tenant_id, owner_kind, owner_name, key_id, nonce, ciphertext, created_at, expires_at)
        values (1, 'endpoint', %s, %s, %s, %s, %s, %s)
        """,
        (
            name,
            key_id,
            nonce,
            vault.seal(secret.key, nonce=nonce, associated=context),
            created_at,
            expires_at,
        ),
    )


async def row(conn: Connection, message_id: UUID) -> dict[str, Any]:
    """The message as it stands."""
    cursor = await conn.execute(
        """
        select state, attempts, reached, token, due_at, lease_until, spared, fault
          from waypost.outbox
         where message_id = %s
        """,
        (message_id,),
    )
    found = await cursor.fetchone()
    assert found is not None, f"no message {message_id}"
    return dict(
        zip(
            ("state", "attempts", "reached", "token", "due_at", "lease_until", "spared", "fault"),
            found,
            strict=True,
        )
    )


async def mail(conn: Connection, execution_id: UUID) -> list[dict[str, Any]]:
    """What the execution was told, in order."""
    cursor = await conn.execute(
        """
        select i.data
          from waypost.mail m
          join waypost.inbox i using (inbox_id)
         where m.execution_id = %s
         order by m.mail_number
        """,
        (execution_id,),
    )
    return [data for (data,) in await cursor.fetchall()]


async def deliveries(conn: Connection, message_id: UUID) -> list[tuple[Any, ...]]:
    """(attempt, outcome, status, error_code) of each try."""
    cursor = await conn.execute(
        """
        select attempt, outcome, status, error_code
          from waypost.delivery
         where message_id = %s
         order by attempt
        """,
        (message_id,),
    )
    return await cursor.fetchall()


class Administrator:
    """Takes a database away from everybody, and gives it back."""

    def __init__(self, dsn: str, database: str) -> None:
        self._dsn = dsn
        self._database = sql.Identifier(database)
        self._name = database

    async def close_database(self) -> None:
        await self._run(sql.SQL("alter database {} with allow_connections false").format(self._database))
        await self._run(
            sql.SQL("select pg_terminate_backend(pid) from pg_stat_activity where datname = {}").format(
                sql.Literal(self._name)
            )
        )

    async def open_database(self) -> None:
        await self._run(sql.SQL("alter database {} with allow_connections true").format(self._database))

    async def _run(self, statement: sql.Composed) -> None:
        async with await AsyncConnection.connect(self._dsn, autocommit=True) as conn:
            await conn.execute(statement)


class Watcher:
    """Remembers the moments that it saw, and lets a test wait for one."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, Mapping[str, object]]] = []
        self._news = asyncio.Event()

    def saw(self, moment: str, /, **fields: object) -> None:
        self.moments.append((moment, fields))
        self._news.set()

    def named(self, moment: str) -> list[Mapping[str, object]]:
        return [fields for name, fields in self.moments if name == moment]

    async def until(self, moment: str, /, **wanted: object) -> Mapping[str, object]:
        """The first moment of that name with these fields, past ones included."""
        async with asyncio.timeout(PATIENCE):
            while True:
                self._news.clear()
                for fields in self.named(moment):
                    if wanted.items() <= fields.items():
                        return fields
                await self._news.wait()


class Names(AbstractResolver):
    """A resolver that answers from a table, each time with the next of the addresses."""

    def __init__(self, **addresses: list[str]) -> None:
        self._addresses = {name.replace("_", "."): list(found) for name, found in addresses.items()}

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        known = self._addresses[host]
        address = known.pop(0) if len(known) > 1 else known[0]
        return [ResolveResult(hostname=host, host=address, port=port, family=family or 2, proto=0, flags=0)]

    async def close(self) -> None:
        """Nothing is open."""
