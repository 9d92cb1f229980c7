"""The database's clock, moved on by a test.

There is one clock, the database's. A test does not replace it, and does not wait for it: it is the real time and a span
that the test has added. Statements and functions of the database say `now()` and `clock_timestamp()` without a schema,
and the search path of a test's server finds those of `waypost_clock` first; the migrations are applied under it too, so
defaults and views have the same time. Nothing of the product is changed for that.

Leases stay what they are: the promises of processes that live. So they are moved along when the clock is, and nobody
loses one because a test let a day pass. Signatures are stamped and checked by the clocks of the processes, which nobody
moves.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, LiteralString

import psycopg

MAKE: Final[LiteralString] = """
    create schema waypost_clock;
    create table waypost_clock.shift (span interval not null);
    insert into waypost_clock.shift values ('0');
    create function waypost_clock.now() returns timestamptz language sql stable as
        'select pg_catalog.now() + s.span from waypost_clock.shift s';
    create function waypost_clock.clock_timestamp() returns timestamptz language sql volatile as
        'select pg_catalog.clock_timestamp() + s.span from waypost_clock.shift s';
    grant usage on schema waypost_clock to public;
    grant select on waypost_clock.shift to public;
"""

SEARCH: Final[LiteralString] = """
    alter role current_user set search_path = waypost_clock, pg_catalog, "$user", public
"""

# Functions that act with the rights of their owner name their search path themselves.
FIXED: Final[LiteralString] = """
    select format('alter function %s set search_path = waypost_clock, pg_catalog, pg_temp', p.oid::regprocedure)
      from pg_catalog.pg_proc p
     where p.pronamespace = 'waypost'::regnamespace
       and 'search_path=pg_catalog, pg_temp' = any(p.proconfig)
"""

# In the order of locks. Who holds a lease renews it by a statement that waits for these, and then sees the new time.
STOP: Final[LiteralString] = "lock table waypost.worker, waypost.outbox in exclusive mode"
MOVE: Final[LiteralString] = "update waypost_clock.shift set span = span + %(span)s::interval"
KEEP_WORKERS: Final[LiteralString] = """
    update waypost.worker
       set lease_until = lease_until + %(span)s::interval
     where dead_at is null
"""
KEEP_CLAIMS: Final[LiteralString] = """
    update waypost.outbox
       set lease_until = lease_until + %(span)s::interval
     where lease_until is not null
"""
LOOK: Final[LiteralString] = """
    select pg_notify('waypost', topic) from unnest(array['execution', 'outbox', 'event']) as topic
"""


def make_search(conn: psycopg.Connection[Any]) -> None:
    """Let every later session of this server look for the time in `waypost_clock` first, where there is one."""
    conn.execute(SEARCH)


def make(conn: psycopg.Connection[Any]) -> None:
    """Give a new database a clock, before anything else is in it."""
    conn.execute(MAKE)


def bind(conn: psycopg.Connection[Any]) -> None:
    """Let the functions of a migrated database that name their own search path have this clock too."""
    for (statement,) in conn.execute(FIXED).fetchall():
        conn.execute(statement)


async def move(conn: psycopg.AsyncConnection[Any], span: timedelta) -> None:
    """Let `span` pass at once, and everybody look."""
    said = {"span": span}
    async with conn.transaction():
        await conn.execute(STOP)
        await conn.execute(MOVE, said)
        await conn.execute(KEEP_WORKERS, said)
        await conn.execute(KEEP_CLAIMS, said)
    await conn.execute(LOOK)
