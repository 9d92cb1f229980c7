"""The commands that prepare a deployment die at any of their commits. Given again, they come to the same end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
import pytest

from contracts.signature import Secret
from contracts.vault import Vault, secret_context
from migrations import runner
from orchestrator.client import Client
from tests.cluster import TEMPLATE, Cluster
from tests.crash.desk import CLIENT, Desk, desk
from tests.crash.points import Point
from tests.engine.flows import FLOWS

pytestmark = pytest.mark.proof

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

URL: Final = "https://bank.example/waypost"


def all_of(passed: Sequence[Point]) -> list[Point]:
    """The points that a command passed, and those where the answer to one of its commits is lost."""
    found = list(dict.fromkeys(passed))
    return [*found, *(lost for point in found for lost in point.lost())]


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize(("kind", "words"), [("endpoint", [URL]), ("sender", [])], ids=["endpoint", "sender"])
async def test_who_registers_again_after_a_crash_has_one_name_and_one_secret(
    dsn: str, conn: Connection, tmp_path: Path, kind: str, words: list[str], *, replace: bool
) -> None:
    async with desk(dsn, tmp_path / "desk") as it:
        points = await passed_by(it, kind, words, name="undisturbed", replace=replace)
        for number, point in enumerate(points):
            name = f"name-{number}"
            if replace:
                assert await it.say(kind, "add", name, *words) == 0
            again = ["--replace"] if replace else []

            it.arm(point)
            assert await it.say(kind, "add", name, *words, *again) != 0
            assert it.fired(point)
            if await it.say(kind, "add", name, *words, *again) != 0:
                assert await it.say(kind, "add", name, *words, "--replace") == 0

            printed = Secret.parse(it.said(CLIENT).splitlines()[-1])
            assert await secrets_of(conn, it, kind, name) == [printed], point

    assert {point.when for point in points} == {"before", "after", "lost"}


async def passed_by(it: Desk, kind: str, words: list[str], *, name: str, replace: bool) -> list[Point]:
    """The points of a registration, and those at which its answer is lost."""
    if replace:
        assert await it.say(kind, "add", name, *words) == 0
    before = len(it.passed(CLIENT))
    assert await it.say(kind, "add", name, *words, *(["--replace"] if replace else [])) == 0
    return all_of(it.passed(CLIENT)[before:])


async def test_who_changes_a_sender_again_after_a_crash_has_changed_it(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    async with desk(dsn, tmp_path / "desk") as it:
        assert await it.say("sender", "add", "undisturbed") == 0
        before = len(it.passed(CLIENT))
        assert await it.say("sender", "set", "undisturbed", "--binary") == 0
        points = all_of(it.passed(CLIENT)[before:])
        for number, point in enumerate(points):
            name = f"name-{number}"
            assert await it.say("sender", "add", name) == 0
            it.arm(point)
            assert await it.say("sender", "set", name, "--binary") != 0
            assert it.fired(point)
            assert await it.say("sender", "set", name, "--binary") == 0

    assert {point.when for point in points} == {"before", "after", "lost"}
    cursor = await conn.execute("select count(*) from waypost.sender where binary_mode")
    assert await cursor.fetchone() == (1 + len(points),)


async def test_who_rotates_again_after_a_crash_has_one_more_secret_that_ends_never(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    async with desk(dsn, tmp_path / "desk") as it:
        assert await it.say("sender", "add", "undisturbed") == 0
        before = len(it.passed(CLIENT))
        assert await it.say("sender", "rotate", "undisturbed") == 0
        points = all_of(it.passed(CLIENT)[before:])
        for number, point in enumerate(points):
            assert await it.say("sender", "add", f"name-{number}") == 0
            it.arm(point)
            assert await it.say("sender", "rotate", f"name-{number}") != 0
            assert it.fired(point)
            assert await it.say("sender", "rotate", f"name-{number}") == 0

    assert {point.when for point in points} == {"before", "after", "lost"}
    cursor = await conn.execute("select owner_name from waypost.secret where expires_at is null")
    assert len(await cursor.fetchall()) == 1 + len(points)


@pytest.mark.parametrize("verb", ["add", "remove"])
async def test_who_changes_a_contract_again_after_a_crash_has_changed_it(
    dsn: str, conn: Connection, tmp_path: Path, verb: str
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')

    async def give(name: str, word: str) -> int:
        words = [str(schema), "--type", name] if word == "add" else [name]
        return await it.say("contract", word, *words)

    async with desk(dsn, tmp_path / "desk") as it:
        assert await give("undisturbed", "add") == 0
        before = len(it.passed(CLIENT))
        assert await give("undisturbed", verb) == 0
        points = all_of(it.passed(CLIENT)[before:])
        for number, point in enumerate(points):
            assert await give(f"name-{number}", "add") == 0
            it.arm(point)
            assert await give(f"name-{number}", verb) != 0
            assert it.fired(point)
            await give(f"name-{number}", verb)

    assert {point.when for point in points} == {"before", "after", "lost"}
    cursor = await conn.execute("select count(*) from waypost.contract")
    assert await cursor.fetchone() == (1 + len(points) if verb == "add" else 0,)


@pytest.mark.parametrize("change", [("set", "--rate", "7"), ("disable",), ("enable",)], ids=lambda it: it[0])
async def test_who_changes_an_endpoint_again_after_a_crash_has_changed_it(
    dsn: str, conn: Connection, tmp_path: Path, change: tuple[str, ...]
) -> None:
    verb, *options = change

    async def prepared(name: str) -> None:
        assert await it.say("endpoint", "add", name, URL) == 0
        if verb == "enable":
            assert await it.say("endpoint", "disable", name) == 0

    async with desk(dsn, tmp_path / "desk") as it:
        await prepared("undisturbed")
        before = len(it.passed(CLIENT))
        assert await it.say("endpoint", verb, "undisturbed", *options) == 0
        points = all_of(it.passed(CLIENT)[before:])
        for number, point in enumerate(points):
            await prepared(f"name-{number}")
            it.arm(point)
            assert await it.say("endpoint", verb, f"name-{number}", *options) != 0
            assert it.fired(point)
            assert await it.say("endpoint", verb, f"name-{number}", *options) == 0

    assert {point.when for point in points} == {"before", "after", "lost"}
    cursor = await conn.execute("select distinct rate, state from waypost.endpoint")
    assert await cursor.fetchall() == [
        (7 if verb == "set" else None, "disabled" if verb == "disable" else "enabled")
    ]


@pytest.mark.parametrize("verb", ["add", "remove"])
async def test_who_subscribes_or_leaves_again_after_a_crash_has_done_it(
    dsn: str, conn: Connection, tmp_path: Path, verb: str
) -> None:
    """A second time there may be nothing left to do, and the command says so."""

    async def give(name: str) -> int:
        return await it.say("subscription", verb, "order.placed", name)

    async def prepared(name: str) -> None:
        assert await it.say("endpoint", "add", name, URL, "--kind", "event") == 0
        if verb == "remove":
            assert await it.say("subscription", "add", "order.placed", name) == 0

    async with desk(dsn, tmp_path / "desk") as it:
        await prepared("undisturbed")
        before = len(it.passed(CLIENT))
        assert await give("undisturbed") == 0
        points = all_of(it.passed(CLIENT)[before:])
        for number, point in enumerate(points):
            await prepared(f"name-{number}")
            it.arm(point)
            assert await give(f"name-{number}") != 0
            assert it.fired(point)
            await give(f"name-{number}")

    assert {point.when for point in points} == {"before", "after", "lost"}
    cursor = await conn.execute("select count(*) from waypost.subscription")
    assert await cursor.fetchone() == (1 + len(points) if verb == "add" else 0,)


async def test_who_terminates_an_execution_again_after_a_crash_has_terminated_it_once(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    client = Client(conn)

    async def started() -> str:
        return str((await client.start(FLOWS.get("three"), 1)).execution_id)

    async with desk(dsn, tmp_path / "desk") as it:

        async def give(execution: str) -> int:
            return await it.say("terminate", execution, "--by", "ann", "--reason", "enough")

        before = len(it.passed(CLIENT))
        assert await give(await started()) == 0
        points = all_of(it.passed(CLIENT)[before:])
        for point in points:
            execution = await started()
            it.arm(point)
            assert await give(execution) != 0
            assert it.fired(point)
            assert await give(execution) == 0
            assert [fact.kind for fact in (await client.show(execution)).facts] == ["started", "terminated"]

    assert {point.when for point in points} == {"before", "after", "lost"}


@pytest.mark.parametrize("verb", ["share", "unshare"])
async def test_who_shares_or_ends_a_share_again_after_a_crash_has_done_it(
    dsn: str, conn: Connection, tmp_path: Path, verb: str
) -> None:
    """A second time there may be nothing left to do, and the command says so."""

    async def give(version: str) -> int:
        return await it.say("flow", verb, version, *(["10"] if verb == "share" else []))

    async def prepared(version: str) -> None:
        if verb == "unshare":
            assert await it.say("flow", "share", version, "10") == 0

    async with desk(dsn, tmp_path / "desk") as it:
        await prepared("undisturbed@1")
        before = len(it.passed(CLIENT))
        assert await give("undisturbed@1") == 0
        points = all_of(it.passed(CLIENT)[before:])
        for number, point in enumerate(points):
            await prepared(f"flow-{number}@1")
            it.arm(point)
            assert await give(f"flow-{number}@1") != 0
            assert it.fired(point)
            await give(f"flow-{number}@1")

    assert {point.when for point in points} == {"before", "after", "lost"}
    cursor = await conn.execute("select count(*) from waypost.share where percent = 10")
    assert await cursor.fetchone() == (1 + len(points) if verb == "share" else 0,)


SECRETS: Final[LiteralString] = """
    select key_id, nonce, ciphertext
      from waypost.secret
     where owner_kind = %s
       and owner_name = %s
"""


async def secrets_of(conn: Connection, it: Desk, kind: str, name: str) -> list[Secret]:
    """What is registered under a name, opened."""
    vault = Vault.from_text(it.environment["WAYPOST_SECRET_KEY"])
    rows = await (await conn.execute(SECRETS, (kind, name))).fetchall()
    found: list[Secret] = []
    for key_id, nonce, ciphertext in rows:
        owner = secret_context(tenant=1, owner_kind=kind, owner_name=name, key_id=key_id)
        found.append(Secret.of(vault.open(ciphertext, nonce=nonce, associated=owner)))
    return found


async def test_who_migrates_again_after_a_crash_has_the_same_database(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with empty(cluster, tmp_path / "undisturbed") as it:
        assert await it.say("migrate") == 0
        points = all_of(it.passed(CLIENT))
    whole = await shape_of(cluster.dsn(TEMPLATE))

    for number, point in enumerate(points):
        async with empty(cluster, tmp_path / str(number)) as it:
            it.arm(point)
            assert await it.say("migrate") != 0
            assert it.fired(point)
            assert await it.say("migrate") == 0
            assert await shape_of(it.environment["WAYPOST_DATABASE_URL"]) == whole, point

    assert {point.when for point in points} == {"before", "after", "lost"}
    assert {point.about for point in points} == {migration.name for migration in runner.discover()}


@asynccontextmanager
async def empty(cluster: Cluster, folder: Path) -> AsyncGenerator[Desk]:
    """A desk before a database that nothing was ever applied to."""
    name = cluster.create(template="template0")
    try:
        async with desk(cluster.dsn(name), folder) as it:
            yield it
    finally:
        cluster.drop(name)


SHAPE: Final[LiteralString] = """
    select 'applied ' || number || ' ' || name || ' ' || sha256 from waypost.migration
     union all
    select 'column ' || table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable
           || coalesce(' ' || column_default, '')
      from information_schema.columns
     where table_schema = 'waypost'
     union all
    select 'constraint ' || conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
      from pg_constraint
     where connamespace = 'waypost'::regnamespace
     union all
    select 'index ' || indexdef from pg_indexes where schemaname = 'waypost'
     union all
    select 'view ' || viewname || ' ' || definition from pg_views where schemaname = 'waypost'
     union all
    select 'function ' || pg_get_functiondef(oid) from pg_proc where pronamespace = 'waypost'::regnamespace
     union all
    select 'trigger ' || pg_get_triggerdef(oid)
      from pg_trigger
     where not tgisinternal
     order by 1
"""


async def shape_of(dsn: str) -> list[str]:
    """All that the scripts made, in words."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        return [line for (line,) in await (await conn.execute(SHAPE)).fetchall()]
