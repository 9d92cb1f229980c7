"""Functions that write the application's own tables: exactly once, whatever happens around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from orchestrator import Context, Refused, StepRefused, attempt, local, seconds, workflow
from orchestrator.client import Client
from orchestrator.engine import transaction as engine
from orchestrator.engine.transaction import Transactions
from orchestrator.flows import Flows
from orchestrator.store import workers
from orchestrator.store.commits import Turn
from orchestrator.store.database import Connection
from orchestrator.store.transactions import check_role
from tests.engine.conftest import Working
from tests.engine.test_worker import REMEMBERING, kinds
from tests.invariants import broken
from tests.waiting import until

Conn = psycopg.AsyncConnection[Any]

RUNS: list[str] = []
"""What the functions did, in order; also what was rolled back."""

GO_ON: list[asyncio.Event] = []
"""Of each test, since an event belongs to one loop."""
BUG = [True]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    RUNS.clear()
    GO_ON[:] = [asyncio.Event()]
    BUG[0] = True
    yield


@pytest.fixture(autouse=True)
async def seat(conn: Connection) -> None:
    """The application's own table."""
    await conn.execute("create table public.seat (who text primary key, price int not null default 1)")
    await conn.execute("create table public.worth (part text primary key, amount int not null)")
    await conn.execute("insert into worth values ('a', 1), ('b', 1)")


async def sits(conn: Conn, who: str) -> dict[str, str]:
    RUNS.append(f"sits {who}")
    conn.row_factory = cast("Any", dict_row)
    cursor = await conn.execute("insert into seat (who) values (%s) returning who", (who,))
    return cast("dict[str, str]", await cursor.fetchone())


async def stands_up(conn: Conn, who: str) -> None:
    await conn.execute("delete from seat where who = %s", (who,))


def leaves(who: str) -> None:
    RUNS.append(f"leaves {who}")


async def sits_and_waits(conn: Conn, who: str) -> str:
    await sits(conn, who)
    await GO_ON[0].wait()
    return who


async def sits_and(conn: Conn, who: str, what: str) -> Any:  # noqa: C901, PLR0912  # a list of mistakes
    """Sits, and then does something that it should not."""
    await sits(conn, who)
    match what:
        case "refuse":
            raise Refused("sold-out", "no seat")
        case "raise":
            raise ValueError("no seat")
        case "bug":
            raise AttributeError("a bug")
        case "commit":
            await conn.commit()
        case "rollback":
            await conn.rollback()
        case "say commit":
            await conn.execute("select 1; -- ;\n  COMMIT")
        case "say rollback":
            await conn.execute(sql.SQL("rollback"))
        case "go on":
            with pytest.raises(psycopg.Error):
                await conn.execute("select 1 / 0")
        case "twice":
            await conn.execute("insert into seat (who) values (%s)", (who,))
        case "put off":
            await conn.execute("alter table seat add unique (price) deferrable initially deferred")
            await conn.execute("insert into seat (who, price) values (%s, 1)", (f"{who} again",))
        case "object":
            return {"no": object()}
        case "large":
            return "x" * 300_000
        case "sleep":
            await asyncio.Event().wait()
        case "savepoint":
            with pytest.raises(psycopg.Error):
                async with conn.transaction():
                    await conn.execute("select 1 / 0")
            await conn.execute("savepoint s")
            await conn.execute("rollback to savepoint s")
            return "well"
        case _:
            raise AssertionError(what)
    return None


async def misfits(conn: Conn, who: str) -> int:
    await sits(conn, who)
    return cast("int", "many")


async def adds_up(conn: Conn, part: str) -> int:
    """The sum of both parts becomes one of them: two of them cannot be in any order."""
    RUNS.append(part)
    await conn.execute("set transaction isolation level serializable")
    [(found,)] = await (await conn.execute("select sum(amount)::int from worth")).fetchall()
    if RUNS.count(part) == 1:
        await meets()
    await conn.execute("update worth set amount = %s where part = %s", (found, part))
    return found


async def locks_both(conn: Conn, first: str, second: str) -> None:
    RUNS.append(first)
    await conn.execute("update worth set amount = amount + 1 where part = %s", (first,))
    if RUNS.count(first) == 1:
        await meets()
    await conn.execute("update worth set amount = amount + 1 where part = %s", (second,))


async def meets() -> None:
    """Until both have come as far."""
    if len(set(RUNS)) == 2:
        GO_ON[0].set()
    await GO_ON[0].wait()


async def names_itself(conn: Conn) -> list[str]:
    await conn.execute("set search_path = nowhere")
    await conn.execute("set statement_timeout = 0")
    cursor = await conn.execute("select current_user::text")
    return [*(row[0] for row in await cursor.fetchall()), attempt().key]


async def looks_at(conn: Conn, table: str) -> int:
    cursor = await conn.execute(sql.SQL("select count(*) from waypost.{}").format(sql.Identifier(table)))
    [(count,)] = await cursor.fetchall()
    return count


async def loses_its_connection(conn: Conn, who: str) -> str:
    await sits(conn, who)
    if len(RUNS) == 1:
        await conn.execute("select pg_terminate_backend(pg_backend_pid())")
    return who


@workflow(name="sat", version="1")
async def sat(ctx: Context, who: str) -> list[str]:
    one = await ctx.transaction(sits, who, undo=lambda done: local(leaves, done["who"]))
    two = await ctx.transaction(sits, f"{who} too")
    return [one["who"], two["who"]]


@workflow(name="waits", version="1")
async def waits(ctx: Context, who: str) -> str:
    return await ctx.transaction(sits_and_waits, who)


@workflow(name="tries", version="1")
async def tries(ctx: Context, given: list[str]) -> str:
    try:
        return str(await ctx.transaction(sits_and, given[0], given[1], name="sit"))
    except StepRefused as no:
        return f"{no.code}: {no.detail}"


@workflow(name="undone", version="1")
async def undone(ctx: Context, who: str) -> None:
    await ctx.transaction(sits, who, undo=lambda done: local(leaves, done["who"]))
    await ctx.transaction(sits_and, f"{who} too", "refuse")


@workflow(name="misfit", version="1")
async def misfit(ctx: Context, who: str) -> str:
    try:
        await ctx.transaction(misfits, who)
    except StepRefused as no:
        return no.code
    return "fits"


@workflow(name="sums", version="1")
async def sums(ctx: Context, n: int) -> list[int]:
    return list(await ctx.all(ctx.transaction(adds_up, "a"), ctx.transaction(adds_up, "b")))


@workflow(name="crosses", version="1")
async def crosses(ctx: Context, n: int) -> str:
    await ctx.all(ctx.transaction(locks_both, "a", "b"), ctx.transaction(locks_both, "b", "a"))
    return "crossed"


@workflow(name="named", version="1")
async def named(ctx: Context, n: int) -> list[str]:
    return await ctx.transaction(names_itself)


@workflow(name="pries", version="1")
async def pries(ctx: Context, table: str) -> str:
    try:
        return str(await ctx.transaction(looks_at, table))
    except StepRefused as no:
        return no.code


@workflow(name="drops", version="1")
async def drops(ctx: Context, who: str) -> str:
    return await ctx.transaction(loses_its_connection, who)


@workflow(name="in-time", version="1")
async def in_time(ctx: Context, who: str) -> str:
    winner = await ctx.first(ctx.transaction(sits_and_waits, who), ctx.sleep(seconds(0.05)))
    return type(winner).__name__


@workflow(name="many", version="1")
async def many(ctx: Context, n: int) -> int:
    async def one(i: int) -> None:
        await ctx.transaction(sits, str(i))

    await ctx.map(range(n), one, concurrency=n)
    return n


@workflow(name="bad-undo", version="1")
async def bad_undo(ctx: Context, who: str) -> str:
    def undo(done: dict[str, str]) -> Any:
        if BUG[0]:
            raise KeyError("a bug")
        return local(leaves, done["who"])

    await ctx.transaction(sits, who, undo=undo)
    return "sat"


FLOWS = Flows(
    [sat, waits, tries, undone, misfit, sums, crosses, named, pries, drops, in_time, many, bad_undo]
)


async def seats(conn: Connection) -> list[str]:
    cursor = await conn.execute("select who from seat order by who")
    return [row[0] for row in await cursor.fetchall()]


async def ran(times: int) -> None:
    """Until functions have begun so many times."""

    async def begun() -> bool:
        return len(RUNS) >= times

    await until(begun, what=f"run {times}")


async def over(client: Client, name: str, given: Any) -> Any:
    started = await client.start(FLOWS.get(name), given)
    view = await client.wait(started.execution_id, seconds=30)
    assert view.row.status in {"completed", "compensated", "failed"}, view.facts[-1].payload
    return view


# ---- what it is for ------------------------------------------------------------------------------------------------


@REMEMBERING
@pytest.mark.postgres
async def test_what_a_function_writes_and_that_it_ended_are_there_together(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(flows=FLOWS, forgetful=forgetful):
        view = await over(client, "sat", "ann")

    assert view.output == ["ann", "ann too"]
    assert await seats(conn) == ["ann", "ann too"]
    assert RUNS == ["sits ann", "sits ann too"]
    assert kinds(view) == [
        "started", "asked sits", "ended sits", "asked sits#2", "ended sits#2", "finished",
    ]  # fmt: skip
    assert await broken(conn) == []


async def test_the_fact_and_the_rows_have_the_same_transaction(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        await over(client, "sat", "ann")

    cursor = await conn.execute(
        "select s.xmin = j.xmin from seat s, waypost.journal j"
        " where s.who = 'ann' and j.kind = 'ended' and j.path = 'sits'"
    )
    assert await cursor.fetchall() == [(True,)]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("refuse", "sold-out: no seat"),
        ("raise", "raised: ValueError: no seat"),
        ("commit", "commits: Commits: COMMIT inside of a transaction function"),
        ("rollback", "commits: Commits: ROLLBACK inside of a transaction function"),
        ("say commit", "commits: Commits: COMMIT inside of a transaction function"),
        ("say rollback", "commits: Commits: ROLLBACK inside of a transaction function"),
        ("go on", "sql-25P02: the function went on after an error of the database"),
        ("twice", "sql-23505: UniqueViolation"),
        ("put off", "sql-23505: UniqueViolation"),
        ("object", "not-encodable: "),
        ("large", "too-large: "),
    ],
)
async def test_what_goes_wrong_in_a_function_leaves_nothing_of_it(
    working: Working, client: Client, conn: Connection, what: str, code: str
) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "tries", ["ann", what])

    assert view.output.startswith(code), view.output
    assert (await seats(conn), len(RUNS)) == ([], 1)


async def test_a_part_of_it_may_be_rolled_back(working: Working, client: Client, conn: Connection) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "tries", ["ann", "savepoint"])

    assert (view.output, await seats(conn)) == ("well", ["ann"])


async def test_a_result_that_does_not_fit_its_annotation_is_not_committed(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "misfit", "ann")

    assert (view.output, await seats(conn)) == ("reply-invalid", [])


async def test_a_bug_is_rolled_back_and_tried_again_as_that_of_a_step(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        started = await client.start(FLOWS.get("tries"), ["ann", "bug"])
        await moments.until("step.tried", outcome="failed")
        await moments.until("turn.committed", times=2)
        view = await client.show(started.execution_id)

    assert kinds(view)[-1] == "attempted sit"
    assert await seats(conn) == []


async def test_its_undo_has_what_the_function_returned(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "undone", "ann")

    assert (view.row.status, await seats(conn)) == ("compensated", ["ann"])
    assert RUNS[-1] == "leaves ann"


async def test_an_undo_that_cannot_be_made_holds_and_rolls_back_until_a_deploy(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        started = await client.start(FLOWS.get("bad-undo"), "ann")
        await moments.until("execution held")
        before = await seats(conn)
        BUG[0] = False
        await client.resume(started.execution_id, by="ann", reason="mended")
        await moments.until("execution finished")
        view = await client.wait(started.execution_id, seconds=30)

    assert (before, await seats(conn), view.row.status) == ([], ["ann"], "completed")


async def test_one_that_is_too_slow_is_rolled_back(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "TRANSACTION_SECONDS_MAX", 0.05)
    async with working(flows=FLOWS):
        view = await over(client, "tries", ["ann", "sleep"])

    assert view.output == "timeout: it took more than 0.05 s"
    assert await seats(conn) == []


async def test_one_that_lost_a_race_is_rolled_back(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "in-time", "ann")

    assert (view.output, await seats(conn)) == ("Elapsed", [])


async def test_many_at_once_wait_for_each_other(working: Working, client: Client, conn: Connection) -> None:
    async with working(flows=FLOWS):
        await over(client, "many", 20)

    assert len(await seats(conn)) == len(RUNS) == 20
    assert await broken(conn) == []


# ---- others come in between ----------------------------------------------------------------------------------------


@pytest.mark.postgres
async def test_a_serialization_failure_runs_the_function_again(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        view = await over(client, "sums", 1)

    assert sorted(view.output) == [2, 3]
    assert moments.count("transaction runs again") == len(RUNS) - 2 >= 1
    assert not [kind for kind in kinds(view) if kind.startswith("attempted")]


async def test_a_deadlock_runs_one_of_the_functions_again(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "crosses", 1)

    cursor = await conn.execute("select part, amount from worth order by part")
    assert (view.output, await cursor.fetchall()) == ("crossed", [("a", 3), ("b", 3)])
    assert len(RUNS) == 3


async def test_one_that_never_gets_through_is_refused(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loses(self: Transactions, conn: Connection, turn: Turn) -> bool:
        raise psycopg.errors.SerializationFailure("as ever")

    monkeypatch.setattr(engine, "BACKOFF_SECONDS_MAX", 0.001)
    monkeypatch.setattr(Transactions, "store", loses)
    async with working(flows=FLOWS):
        view = await over(client, "tries", ["ann", "savepoint"])

    assert view.output.startswith(f"contention: rolled back {engine.TRANSACTION_TRIES_MAX} times")
    assert (len(RUNS), await seats(conn)) == (engine.TRANSACTION_TRIES_MAX, [])


# ---- somebody dies -------------------------------------------------------------------------------------------------


async def bury(conn: Connection) -> None:
    """Every worker is silent for too long, so what they own is taken over."""
    await conn.execute("update waypost.worker set lease_until = clock_timestamp() - interval '1 ms'")
    await workers.bury(conn)
    await workers.take_over(conn, limit=10)


async def test_an_owner_whose_fence_is_stale_commits_nothing_and_the_next_one_does(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zombie: it was taken over while its function ran, and comes back to commit."""
    store, answers = Transactions.store, list[bool]()

    async def late(self: Transactions, on: Connection, turn: Turn) -> bool:
        if not answers:
            await bury(conn)
        answers.append(await store(self, on, turn))
        return answers[-1]

    monkeypatch.setattr(Transactions, "store", late)
    async with working(flows=FLOWS):
        started = await client.start(FLOWS.get("waits"), "ann")
        GO_ON[0].set()
        view = await client.wait(started.execution_id, seconds=30)

    assert (answers, len(RUNS)) == ([False, True], 2)
    assert (view.output, await seats(conn)) == ("ann", ["ann"])
    assert [kind for kind in kinds(view) if kind.startswith("ended")] == ["ended sits_and_waits"]
    assert await broken(conn) == []


async def test_two_owners_at_once_write_once(working: Working, client: Client, conn: Connection) -> None:
    """Both run the function, side by side: the second waits for the row of the first, and only one commits."""
    async with working(flows=FLOWS, lease=timedelta(minutes=5)) as first:
        started = await client.start(FLOWS.get("waits"), "ann")
        await first.until("turn.committed")
        await ran(1)
        await bury(conn)
        async with working(flows=FLOWS):
            await ran(2)
            GO_ON[0].set()
            view = await client.wait(started.execution_id, seconds=30)

    assert (view.output, await seats(conn)) == ("ann", ["ann"])
    assert [kind for kind in kinds(view) if kind.startswith("ended")] == ["ended sits_and_waits"]
    assert await broken(conn) == []


async def test_a_worker_that_dies_before_the_commit_leaves_nothing(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS, lease=timedelta(minutes=5)) as moments:
        started = await client.start(FLOWS.get("waits"), "ann")
        await moments.until("turn.committed")
        await ran(1)
    assert await seats(conn) == []
    GO_ON[0].set()
    async with working(flows=FLOWS):
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.output, await seats(conn), len(RUNS)) == ("ann", ["ann"], 2)


async def test_a_worker_that_dies_after_the_commit_does_not_write_again(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last commit was the transaction's: nothing of what the flow said to that was written."""
    from orchestrator.core.machine import Machine  # noqa: PLC0415
    from orchestrator.engine.committer import LeaseLost  # noqa: PLC0415

    believe = Machine.believe
    died = list[bool]()

    def dies(self: Machine, fact: Any) -> None:
        if not died:
            died.append(True)
            raise LeaseLost("it died here")
        believe(self, fact)

    monkeypatch.setattr(Machine, "believe", dies)
    async with working(flows=FLOWS, lease=timedelta(minutes=5)) as moments:
        started = await client.start(FLOWS.get("sat"), "ann")
        await moments.until("execution lost")
        [(last,)] = await (
            await conn.execute("select kind from waypost.journal order by position desc limit 1")
        ).fetchall()
        await bury(conn)
        async with working(flows=FLOWS):
            view = await client.wait(started.execution_id, seconds=30)

    assert last == "ended"
    assert (view.output, RUNS) == (["ann", "ann too"], ["sits ann", "sits ann too"])
    assert await broken(conn) == []


@pytest.mark.parametrize("arrived", [True, False], ids=["committed", "not committed"])
async def test_a_commit_whose_answer_is_lost_is_looked_up(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    store, lost = Transactions.store, list[bool]()

    async def deaf(self: Transactions, on: Connection, turn: Turn) -> bool:
        done = await store(self, on, turn)
        if not lost:
            lost.append(True)
            if arrived:
                on.pgconn.exec_(b"commit")
            on.pgconn.finish()
        return done

    monkeypatch.setattr(Transactions, "store", deaf)
    async with working(flows=FLOWS) as moments:
        view = await over(client, "sat", "ann")

    assert moments.count("commit looked up", committed=int(arrived)) == 1
    assert (view.output, await seats(conn)) == (["ann", "ann too"], ["ann", "ann too"])
    assert RUNS.count("sits ann") == (1 if arrived else 2)
    assert await broken(conn) == []


async def test_a_connection_that_is_lost_in_the_function_runs_it_again(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        view = await over(client, "drops", "ann")

    assert (view.output, await seats(conn), len(RUNS)) == ("ann", ["ann"], 2)


# ---- who it is -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def shop(conn: Connection) -> AsyncIterator[str]:
    """A role that may use the application's tables, and nothing of ours."""
    name = f"shop_{uuid4().hex}"
    role = sql.Identifier(name)
    await conn.execute(sql.SQL("create role {}").format(role))
    await conn.execute(sql.SQL("grant all on seat, worth to {}").format(role))
    yield name
    await conn.execute(sql.SQL("drop owned by {}").format(role))
    await conn.execute(sql.SQL("drop role {}").format(role))


@pytest.mark.postgres
async def test_functions_run_as_the_role_of_the_application_and_facts_are_written_as_ours(
    working: Working, client: Client, conn: Connection, shop: str
) -> None:
    await check_role(conn, shop)
    async with working(flows=FLOWS, application_role=shop):
        view = await over(client, "named", 1)
        sat = await over(client, "sat", "ann")
        pried = await over(client, "pries", "journal")

    assert view.output == [shop, f"{view.row.execution_id}/0/names_itself"]
    assert sat.output == ["ann", "ann too"]
    assert pried.output == "sql-42501"


async def test_a_worker_without_transactions_has_no_connection_for_them(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        await moments.until("worker started")
        cursor = await conn.execute(
            "select count(*) from pg_stat_activity where application_name = 'waypost-transaction'"
        )
        assert await cursor.fetchall() == [(0,)]
