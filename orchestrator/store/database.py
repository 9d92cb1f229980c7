"""The way to the database: a pool per process, the settings it must have, what its errors mean for us."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Final, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool

from contracts.errors import UnsafeDatabase

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Pool = AsyncConnectionPool[Connection]

STATEMENT_MAX: Final = timedelta(seconds=5)
"""The only bound that works on the server's side; every statement of ours takes milliseconds."""
LOCK_MAX: Final = timedelta(seconds=2)
IDLE_IN_TRANSACTION_MAX: Final = timedelta(seconds=5)
"""A forgotten transaction keeps every dead row of every table."""
CONNECT_MAX_SECONDS: Final = 3
GET_MAX_SECONDS: Final = 5.0
IDLE_MAX_SECONDS: Final = 5 * 60.0
LIFETIME_MAX_SECONDS: Final = 30 * 60.0
RECONNECT_MAX_SECONDS: Final = 5.0
"""How long the pool tries again by itself, in pauses that double from 1 s; then whoever next asks for a
connection begins anew. After 18 s without the server, 60 s here cost 12 s more of outage, and 5 s cost 1 s."""


def pool(
    dsn: str,
    *,
    size: int,
    name: str,
    least: int = 1,
    kind: type[Connection] = Connection,
    arguments: Mapping[str, Any] | None = None,
    reset: Callable[[Connection], Awaitable[None]] | None = None,
) -> Pool:
    """A pool of at most `size` connections, not open yet: enter it, or await its `open()`. It keeps `least` of them.
    They are of a `kind`, made with `arguments`, and `reset` when they come back, where those are given.

    Connections are in autocommit, so that a transaction is always a block that one can see. A connection is
    checked before it is handed out: one to a server that takes no writes any more (a failover) is dropped.
    """
    return AsyncConnectionPool(
        dsn,
        connection_class=kind,
        kwargs=dict(arguments) if arguments is not None else connection_arguments(dsn, name=name),
        min_size=min(size, least),
        max_size=size,
        open=False,
        check=check_writable,
        reset=reset,
        name=f"waypost-{name}",
        timeout=GET_MAX_SECONDS,
        max_idle=IDLE_MAX_SECONDS,
        max_lifetime=LIFETIME_MAX_SECONDS,
        reconnect_timeout=RECONNECT_MAX_SECONDS,
    )


def connection_arguments(dsn: str, *, name: str) -> dict[str, Any]:
    """Keyword arguments for psycopg's connect: limits on both sides of the wire. What the DSN says wins."""
    limits = " ".join(
        f"-c {setting}={int(limit.total_seconds() * 1000)}"
        for setting, limit in (
            ("statement_timeout", STATEMENT_MAX),
            ("lock_timeout", LOCK_MAX),
            ("idle_in_transaction_session_timeout", IDLE_IN_TRANSACTION_MAX),
        )
    )
    said = conninfo_to_dict(dsn)
    ours: dict[str, Any] = {
        "application_name": f"waypost-{name}",
        "target_session_attrs": "read-write",
        "connect_timeout": CONNECT_MAX_SECONDS,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
    }
    arguments = {key: value for key, value in ours.items() if key not in said}
    # The last of two equal options holds.
    return {**arguments, "autocommit": True, "options": f"{limits} {said.get('options', '')}".strip()}


IN_RECOVERY: Final[LiteralString] = "select pg_is_in_recovery()"


async def check_writable(conn: Connection) -> None:
    """Raise OperationalError when the server takes no writes, so that the pool drops the connection."""
    row = await (await conn.execute(IN_RECOVERY)).fetchone()
    if row is None or row[0]:
        raise psycopg.OperationalError("the server is a standby: it takes no writes")


SAFE: Final[Mapping[str, tuple[str, Callable[[str], bool]]]] = {
    "server_version_num": ("150000 or newer", lambda found: int(found) >= 150_000),
    "fsync": ("on", lambda found: found == "on"),
    "full_page_writes": ("on", lambda found: found == "on"),
    "synchronous_commit": ("anything but off", lambda found: found != "off"),
    "server_encoding": ("UTF8", lambda found: found == "UTF8"),
    "default_transaction_isolation": ("read committed", lambda found: found == "read committed"),
    "default_transaction_read_only": ("off", lambda found: found == "off"),
    "session_replication_role": ("origin", lambda found: found == "origin"),
    "zero_damaged_pages": ("off", lambda found: found == "off"),
}
"""What each promise of ours stands on. A server that differs may lose or tear what it acknowledged."""

READ_SETTINGS: Final[LiteralString] = """
    select name, setting
      from pg_settings
     where name = any(%(names)s::text[])
"""


async def check_settings(conn: Connection) -> None:
    """Raise UnsafeDatabase when a setting of this session is not safe; asked for once, at the start.

    A commit that is on fewer disks than its `synchronous_commit` says is the operator's choice; `off`, which
    acknowledges what is on none, is refused.
    """
    cursor = await conn.execute(READ_SETTINGS, {"names": list(SAFE)})
    found = dict(await cursor.fetchall())
    for setting, (expected, is_safe) in SAFE.items():
        if not is_safe(found[setting]):
            raise UnsafeDatabase(setting, expected, found[setting])


def is_transient(error: BaseException) -> bool:
    """Whether the same transaction may succeed later: repeat the whole of it, never a part.

    Serialization failure, deadlock, a lock or a statement that took too long, a connection that is gone or a
    server that is going. What the transaction did is unknown when its COMMIT was on the way.
    """
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate in TRANSIENT or error.sqlstate.startswith("08")


TRANSIENT: Final = frozenset(
    {
        "25006",  # read only: a failover made our server a standby
        "40001",  # serialization failure
        "40P01",  # deadlock detected
        "53300",  # too many connections
        "55P03",  # lock not available
        "57014",  # query cancelled, by a timeout too
        "57P01",  # admin shutdown
        "57P02",  # crash shutdown
        "57P03",  # cannot connect now
        "57P05",  # idle session timeout
    }
)


def is_bad_data(error: BaseException) -> bool:
    """Whether what was written is at fault (data, constraint, limit): repeating it would fail again.

    A batch that fails so is split until the one at fault stands alone.
    """
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in {"22", "23", "54"}
