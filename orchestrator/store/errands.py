"""What an application asks for in a transaction of its own, by the functions that are made for it."""

from __future__ import annotations

from typing import Any, Final, LiteralString, TypeAlias

import psycopg
from psycopg.rows import tuple_row

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]

START: Final[LiteralString] = """
    select waypost.start(%(flow)s::text, %(input)s::jsonb, key => %(key)s::text, version => %(version)s::text,
                         traceparent => %(traceparent)s::text)
"""

SIGNAL: Final[LiteralString] = """
    select waypost.signal(%(type)s::text, %(key)s::text, %(data)s::jsonb, id => %(id)s::text,
                          traceparent => %(traceparent)s::text)
"""

PUBLISH: Final[LiteralString] = """
    select waypost.publish(%(type)s::text, %(key)s::text, %(data)s::jsonb, source => %(source)s::text,
                           id => %(id)s::text, traceparent => %(traceparent)s::text)
"""

Parameters: TypeAlias = dict[str, str | None]


def give(conn: Connection, statement: LiteralString, parameters: Parameters) -> Any:
    """What the function in one of these statements returned, whatever rows the application's connection makes."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement, parameters).fetchone()
    return None if row is None else row[0]


async def give_later(conn: AsyncConnection, statement: LiteralString, parameters: Parameters) -> Any:
    """As `give`."""
    async with conn.cursor(row_factory=tuple_row) as cursor:
        row = await (await cursor.execute(statement, parameters)).fetchone()
    return None if row is None else row[0]
