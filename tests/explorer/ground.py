"""A database that is put back, quickly, to where a race begins, and the sessions that race on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import sql

from orchestrator.store.database import Connection
from tests.explorer.sessions import OPTIONS, Explorer
from tests.invariants import INVARIANTS, OF_SCRIPTS

SESSIONS: Final = 3

UNTOUCHED: Final = ("migration", "tenant", "endpoint", "sender", "secret")
"""What no race writes."""

VACUUM_EVERY: Final = 200
"""Each return leaves dead rows; so often they are removed."""

TABLES: Final[LiteralString] = """
    select c.relname
      from pg_class c
     where c.relnamespace = 'waypost'::regnamespace
       and c.relkind = 'r'
       and c.relname <> all(%s)
     order by c.relname
"""

SEQUENCES: Final[LiteralString] = """
    select c.relname
      from pg_class c
     where c.relnamespace = 'waypost'::regnamespace
       and c.relkind = 'S'
       and split_part(c.relname, '_', 1) <> all(%s)
     order by c.relname
"""

PARENT: Final = "definition"
"""The table that others refer to: emptied last, and filled first."""

MUTABLE: Final[LiteralString] = "alter table waypost.definition disable trigger user"
"""What was published is never changed, but for the next race."""

ENTERS: Final[LiteralString] = """
    select pg_get_triggerdef(t.oid)
      from pg_trigger t
     where t.tgrelid = 'waypost.outbox'::regclass
       and t.tgname = 'enters_its_lane'
"""

PUTS_BACK: Final[LiteralString] = "set_config('explorer.puts_back', '1', true)"

FUNCTION: Final[LiteralString] = """
    create function {name}() returns void language plpgsql as {body}
"""

BROKEN: Final = (
    sql.SQL(" union all ")
    .join(
        sql.SQL("select {} || q.what::text from ({}) q(what)").format(f"{name}: ", sql.SQL(query))
        for name, query in (INVARIANTS | OF_SCRIPTS).items()
    )
    .as_bytes()
)
"""All that `tests.invariants` asks, in one statement, so that its plan is kept."""


class Ground:
    """One database. Its connections live as long as it does: a new one would have to make every plan anew."""

    def __init__(self, dsn: str, keeper: psycopg.Connection[Any], conn: Connection) -> None:
        self.dsn = dsn
        self.conn = conn
        self._keeper = keeper
        self._returns = 0
        self._explorer: Explorer | None = None
        self._stack = AsyncExitStack()

    @classmethod
    @asynccontextmanager
    async def at(cls, dsn: str) -> AsyncGenerator[Self]:
        """The ground in the database of `dsn`, whose functions have gates, until the block ends."""
        with psycopg.connect(dsn, autocommit=True, options=OPTIONS) as keeper:
            async with await Connection.connect(dsn, autocommit=True, options=OPTIONS) as conn:
                ground = cls(dsn, keeper, conn)
                try:
                    yield ground
                finally:
                    await ground._stack.aclose()

    async def explorer(self) -> Explorer:
        """Sessions at rest. Those that an order left in the middle of something are replaced."""
        if self._explorer is not None and self._explorer.is_spoilt:
            await self._stack.aclose()
            self._explorer = None
        if self._explorer is None:
            opened = Explorer.over(self.dsn, sessions=SESSIONS)
            self._explorer = await self._stack.enter_async_context(opened)
        return self._explorer

    def clear(self) -> None:
        """Empty every table that a race may write, and let all numbers begin at one."""
        self._keeper.execute("select explorer.clear()")

    def keep(self) -> None:
        """Remember how the database is: `restore` comes back to it."""
        self._keeper.execute("select explorer.keep()")

    def restore(self, then: str = "") -> None:
        """Everything is as it was when `keep` was called, and `then` is done; no transaction may be open."""
        self._returns += 1
        if self._returns % VACUUM_EVERY == 0:
            self._keeper.execute("vacuum")
        self._keeper.execute("select explorer.restore()")
        if then:
            self._keeper.execute(then.encode())

    def broken(self) -> list[str]:
        """What does not hold, as sentences."""
        return [sentence for (sentence,) in self._keeper.execute(BROKEN, prepare=True).fetchall()]


def furnish(conn: psycopg.Connection[Any]) -> None:
    """Make the functions `clear`, `keep` and `restore` for the tables and sequences that there are now."""
    tables = [name for (name,) in conn.execute(TABLES, (list(UNTOUCHED),)).fetchall()]
    sequences = [name for (name,) in conn.execute(SEQUENCES, (list(UNTOUCHED),)).fetchall()]
    conn.execute(MUTABLE)
    keep_numbers(conn)
    keep = list[sql.Composable]()
    emptied, filled = list[sql.Composable](), list[sql.Composable]()
    for name in sorted(tables, key=lambda name: name == PARENT):
        ours, kept = sql.Identifier("waypost", name), sql.Identifier("explorer", name)
        conn.execute(sql.SQL("create table {} (like {})").format(kept, ours))
        emptied.append(sql.SQL("delete from {}").format(ours))
        keep.append(sql.SQL("delete from {}; insert into {} table {}").format(kept, kept, ours))
        filled.append(sql.SQL("insert into {} overriding system value table {}").format(ours, kept))
    marked = sql.SQL("perform {}").format(sql.SQL(PUTS_BACK))
    clear, restore = [*emptied], [*emptied, marked, filled[-1], *filled[:-1]]
    for name in sequences:
        ours, kept = sql.Identifier("waypost", name), sql.Identifier("explorer", name)
        conn.execute(sql.SQL("create table {} (last_value bigint, is_called boolean)").format(kept))
        clear.append(sql.SQL("perform setval({}, 1, false)").format(f"waypost.{name}"))
        values = sql.SQL("select last_value, is_called from {}").format(ours)
        keep.append(sql.SQL("delete from {}; insert into {} {}").format(kept, kept, values))
        value = sql.SQL("perform setval({}, last_value, is_called) from {}")
        restore.append(value.format(f"waypost.{name}", kept))
    for name, steps in (("clear", clear), ("keep", keep), ("restore", restore)):
        body = f"begin {sql.SQL('; ').join(steps).as_string(conn)}; end"
        conn.execute(sql.SQL(FUNCTION).format(name=sql.Identifier("explorer", name), body=body))


def keep_numbers(conn: psycopg.Connection[Any]) -> None:
    """A message that is put back enters no lane anew: it would get another number there."""
    [(made,)] = conn.execute(ENTERS).fetchall()
    condition = "WHEN (current_setting('explorer.puts_back', true) IS DISTINCT FROM '1' AND "
    assert made.count("WHEN (") == 1, made
    conn.execute("drop trigger enters_its_lane on waypost.outbox")
    conn.execute(made.replace("WHEN (", condition).encode())
