"""Payloads that are too large for a row are in the payload store before the commit that names them, and come back."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import UUID

import pytest
from pydantic import BaseModel

from contracts.codec import Codec, Sealing, keys_of
from contracts.errors import TooLarge
from contracts.limits import PAYLOAD_BYTES_MAX, PAYLOAD_STORED_BYTES_MAX
from contracts.objects import ObjectMissing, ObjectStore, StoreAway, StoreDenied
from orchestrator import Context, Sensitive, local, workflow
from orchestrator.client import Client, ExecutionView
from orchestrator.flows import Flows
from orchestrator.objects import sweep as sweeping
from orchestrator.objects.files import FileStore
from orchestrator.objects.kept import Kept
from orchestrator.objects.large import Large
from orchestrator.objects.sweep import sweep
from orchestrator.rekey import rekey
from orchestrator.replays import Finding, Would, check
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.waiting import until

WEEK: Final = timedelta(days=7)
LARGE: Final = "x" * (PAYLOAD_BYTES_MAX + 1)
FIRST, SECOND = (base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))


class Paper(BaseModel):
    card: Annotated[str, Sensitive]
    text: str


def doubled(text: str) -> str:
    return text + text


def size_of(text: str) -> int:
    return len(text)


def words(text: str, most: int) -> list[str]:
    return [text[:most]]


@workflow(name="large", version="1")
async def large(ctx: Context, text: str) -> str:
    twice = await ctx.step(doubled, text, undo=lambda it: local(size_of, it or ""))
    assert await ctx.step(size_of, twice) == len(twice)
    await ctx.sleep(timedelta(milliseconds=1))
    return await ctx.child(large_child, twice)


@workflow(name="large-child", version="1")
async def large_child(ctx: Context, text: str) -> str:
    return await ctx.step(doubled, text)


@workflow(name="large-paper", version="1")
async def large_paper(ctx: Context, paper: Paper) -> None:
    raise RuntimeError(f"no card has the number {paper.card}")


FLOWS: Final = Flows([large, large_child, large_paper])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    use(FileStore(tmp_path / "objects"))
    yield tmp_path / "objects"
    Large.kept = None
    Sealing.codec = None


def use(store: ObjectStore) -> None:
    """As another process would: with nothing in memory."""
    Large.kept = Kept(store)


def seal_with(text: str) -> Codec:
    Sealing.codec = codec = Codec(keys_of(text), os.urandom)
    return codec


def quiet(*_: object) -> None:
    pass


def objects_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def until_over(client: Client, started: UUID) -> ExecutionView:
    return await client.wait(started, seconds=30)


async def largest_row(conn: Connection) -> int:
    found = await conn.execute("""
        select greatest((select max(length(payload::text)) from waypost.journal),
                        (select max(length(data::text)) from waypost.inbox))
    """)
    row = await found.fetchone()
    assert row is not None
    return int(row[0])


async def referring_facts(conn: Connection, execution: UUID) -> list[tuple[str, str]]:
    """Kind of each fact that names objects, and which part of it is elsewhere."""
    found = await conn.execute(
        """
        select kind, part
          from waypost.journal, jsonb_object_keys(payload->'objects') part
         where execution_id = %s and payload ? 'objects'
         order by position, part
        """,
        (execution,),
    )
    return await found.fetchall()


@pytest.mark.parametrize("sealed", [False, True])
async def test_inputs_arguments_results_and_outputs_go_by_reference_and_come_back(
    working: Working, client: Client, conn: Connection, folder: Path, *, sealed: bool
) -> None:
    if sealed:
        seal_with(f"first:{FIRST}")
    started = (await client.start(FLOWS.get("large"), LARGE, key="one")).execution_id
    async with working(flows=FLOWS, forgetful=True):
        view = await until_over(client, started)

    assert view.output == LARGE * 4
    assert await largest_row(conn) < 4096
    assert await referring_facts(conn, started) == [
        ("started", "input"),
        ("asked", "args.data"),
        ("ended", "undo.data"),
        ("ended", "value"),
        ("asked", "args.data"),
        ("asked", "args.data"),
        ("ended", "value"),
        ("finished", "output"),
    ]
    stored = b"".join(path.read_bytes() for path in objects_in(folder))
    assert (b"xxxxxxxxxxxx" in stored) is not sealed
    again = await client.start(FLOWS.get("large"), LARGE, key="one")
    assert (again.execution_id, again.outcome) == (started, "exists")


async def test_people_are_shown_a_reference_and_nothing_is_loaded(
    working: Working, client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("large-child"), LARGE)).execution_id
    async with working(flows=FLOWS):
        await until_over(client, started)
    use(Broken(ObjectMissing("", "nowhere")))

    view = await client.shown(started)
    rows = await client.list()

    size = 2 * len(LARGE) + 2
    assert view.output["object"]["size"] == size
    assert json.loads(view.facts[-1].payload or "")["objects"]["output"] == view.output["object"]
    assert [row.execution_id for row in rows] == [str(started)]
    with pytest.raises(ObjectMissing):
        await client.show(started)


async def test_what_is_sensitive_in_a_large_payload_is_in_no_text(
    working: Working, client: Client, conn: Connection
) -> None:
    given = {"card": "4242-4242", "text": LARGE}
    started = (await client.start(FLOWS.get("large-paper"), given)).execution_id
    async with working(flows=FLOWS):
        await until_over(client, started)

    view = await client.shown(started)

    assert view.error is not None
    assert "[redacted]" in view.error.values(), view.error
    assert not any("4242" in (fact.payload or "") for fact in view.facts)


async def test_without_a_store_and_beyond_its_limit_an_input_is_refused(conn: Connection) -> None:
    client = Client(conn)
    with pytest.raises(TooLarge, match=f"at most {PAYLOAD_STORED_BYTES_MAX} bytes"):
        await client.start(FLOWS.get("large"), "x" * PAYLOAD_STORED_BYTES_MAX)
    Large.kept = None
    with pytest.raises(TooLarge, match=f"at most {PAYLOAD_BYTES_MAX} bytes"):
        await client.start(FLOWS.get("large"), LARGE)
    assert await client.list() == []


def loses(folder: Path) -> str:
    for path in objects_in(folder):
        path.unlink()
    return "missing"


def changes(folder: Path) -> str:
    for path in objects_in(folder):
        path.write_bytes(b"y" * path.stat().st_size)
    return "others"


def cuts(folder: Path) -> str:
    for path in objects_in(folder):
        path.write_bytes(path.read_bytes()[:-1])
    return "bytes instead of"


def forgets_its_setting(folder: Path) -> str:
    Large.kept = None
    return "WAYPOST_PAYLOAD_STORE"


@pytest.mark.parametrize("fault", [loses, changes, cuts, forgets_its_setting])
async def test_an_object_that_cannot_be_had_holds_its_execution_until_it_is_there_again(
    working: Working, client: Client, conn: Connection, folder: Path, fault: Any
) -> None:
    started = (await client.start(FLOWS.get("large-child"), LARGE)).execution_id
    saved = {path: path.read_bytes() for path in objects_in(folder)}
    use(FileStore(folder))
    why = fault(folder)
    async with working(flows=FLOWS):
        held = await until_over(client, started)
        refused = await checked(conn)
        await client.resume(started, by="ann", reason="to see")

        async def held_again() -> bool:
            view = await client.show(started)
            return [fact.kind for fact in view.facts].count("held") == 2 and view.row.owner is None

        await until(held_again, what="the second hold")
        for path, data in saved.items():
            path.write_bytes(data)
        use(FileStore(folder))
        await client.resume(started, by="ann", reason="it is there again")

        async def over() -> bool:
            return (await client.show(started)).row.status == "completed"

        await until(over, what="its end")

    assert held.held is not None
    assert held.held.code == "payload-unavailable"
    assert why in held.held.reason
    assert [(one.would, one.code) for one in refused] == [(Would.STAY_HELD, "payload-unavailable")]


async def checked(conn: Connection) -> list[Finding]:
    found: list[Finding] = []
    await check(conn, FLOWS, tenant=1, progress=quiet, said=found.append)
    return found


class Broken:
    """A store that fails in one way until it is mended."""

    name = "broken:"

    def __init__(self, error: Exception, then: ObjectStore | None = None) -> None:
        self.error: Exception | None = error
        self.then = then
        self.asked = asyncio.Event()

    def _fail(self) -> ObjectStore:
        self.asked.set()
        if self.error is not None:
            raise self.error
        assert self.then is not None
        return self.then

    async def put(self, digest: str, data: bytes) -> None:
        await self._fail().put(digest, data)

    async def get(self, digest: str, *, size: int) -> bytes:
        return await self._fail().get(digest, size=size)

    async def delete(self, digest: str, *, than: Any) -> None:
        await self._fail().delete(digest, than=than)

    async def older(self, than: Any, *, after: str, limit: int) -> list[str]:
        return await self._fail().older(than, after=after, limit=limit)


@pytest.mark.parametrize("error", [StoreAway("broken:", "no answer"), StoreDenied("broken:", "403")])
async def test_nothing_names_an_object_before_the_store_has_it_and_no_result_is_lost_meanwhile(
    working: Working, client: Client, conn: Connection, folder: Path, error: Exception
) -> None:
    started = (await client.start(FLOWS.get("large-child"), SMALL)).execution_id
    store = Broken(error, FileStore(folder))
    use(store)
    async with working(flows=FLOWS) as moments:
        await store.asked.wait()
        before = await referring_facts(conn, started)
        store.error = None
        view = await until_over(client, started)

    assert before == []
    assert view.output == SMALL * 2
    assert moments.count("payload store away") == 1
    assert [fact.kind for fact in view.facts] == ["started", "asked", "ended", "finished"]


SMALL: Final = "x" * (PAYLOAD_BYTES_MAX - 2)


async def test_a_store_that_is_away_when_something_is_loaded_is_asked_again(
    working: Working, client: Client, folder: Path
) -> None:
    started = (await client.start(FLOWS.get("large-child"), LARGE)).execution_id
    store = Broken(StoreAway("broken:", "no answer"), FileStore(folder))
    use(store)
    async with working(flows=FLOWS):
        await store.asked.wait()
        store.error = None
        assert (await until_over(client, started)).row.status == "completed"


async def test_an_input_that_the_store_does_not_take_starts_nothing(conn: Connection) -> None:
    client = Client(conn)
    use(Broken(StoreDenied("broken:", "403")))
    with pytest.raises(StoreDenied, match="broken:"):
        await client.start(FLOWS.get("large"), LARGE)
    assert await client.list() == []


async def test_rekey_seals_objects_with_the_newest_key_too(
    working: Working, client: Client, conn: Connection, folder: Path
) -> None:
    started = (await client.start(FLOWS.get("large"), LARGE)).execution_id
    seal_with(f"first:{FIRST}")
    async with working(flows=FLOWS):
        await until_over(client, started)
    newest = seal_with(f"second:{SECOND},first:{FIRST}")

    done = await rekey(conn, newest, progress=quiet)
    again = await rekey(conn, newest, progress=quiet)

    seal_with(f"second:{SECOND}")
    use(FileStore(folder))
    assert (done > 0, again) == (True, 0)
    assert (await client.show(started)).output == LARGE * 4
    found = await conn.execute(
        "select distinct v->>'key' from waypost.journal, jsonb_each(payload->'objects') o(k, v)"
    )
    assert await found.fetchall() == [("second",)]


@pytest.mark.parametrize(
    "found",
    [
        '{"input": {"sha256": "../../../etc/passwd", "size": 1, "type": "application/json"}}',
        '{"seed": {}}',
        "[]",
    ],
)
async def test_a_reference_that_is_none_holds_its_execution(
    working: Working, client: Client, conn: Connection, found: str
) -> None:
    started = (await client.start(FLOWS.get("large-child"), LARGE)).execution_id
    await conn.execute(
        "update waypost.journal set payload = jsonb_set(payload, '{objects}', %s::jsonb)", (found,)
    )
    async with working(flows=FLOWS):
        view = await until_over(client, started)
    assert view.held is not None
    assert view.held.code == "payload-unavailable"


async def test_a_sweep_removes_what_nothing_names_and_is_old_and_nothing_else(
    working: Working, client: Client, conn: Connection, folder: Path
) -> None:
    store = FileStore(folder)
    started = (await client.start(FLOWS.get("large"), LARGE)).execution_id
    async with working(flows=FLOWS):
        await until_over(client, started)
    named = objects_in(folder)
    old, young = [await Kept(store).put(1, text) for text in (b"old", b"young")]
    for path in objects_in(folder):
        if path.name != young.sha256:
            os.utime(path, (0, 0))
    told: list[tuple[int, int]] = []

    counted = await sweep(conn, store, age=WEEK, dry=True, progress=quiet)
    before = objects_in(folder)
    swept = await sweep(conn, store, age=WEEK, progress=lambda looked, gone: told.append((looked, gone)))

    assert (counted, swept) == (1, 1)
    assert {path.name for path in before} - {path.name for path in objects_in(folder)} == {old.sha256}
    assert {path.name for path in named} | {young.sha256} == {path.name for path in objects_in(folder)}
    assert told == [(len(named) + 1, 1)]
    use(store)
    assert (await client.show(started)).output == LARGE * 4


async def test_what_only_mail_names_that_nobody_has_read_yet_is_kept(conn: Connection, folder: Path) -> None:
    store = FileStore(folder)
    one = await Kept(store).put(1, b"the output of a child")
    said = json.dumps({"outcome": "done", "objects": {"value": one.as_json()}})
    await conn.execute(
        """
        insert into waypost.inbox (tenant_id, kind, sender, source, event_id, digest, answer, received_at, data)
        values (1, 'child', 'waypost', 'waypost:execution', 'e', '', 'mail', now(), %s::jsonb)
        """,
        (said,),
    )
    for path in objects_in(folder):
        os.utime(path, (0, 0))

    assert await sweep(conn, store, age=WEEK, progress=quiet) == 0
    assert [path.name for path in objects_in(folder)] == [one.sha256]


async def test_many_objects_are_swept_in_pages(
    conn: Connection, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "PAGE_MAX", 2)
    store = FileStore(folder)
    for number in range(5):
        await Kept(store).put(1, str(number).encode())
    for path in objects_in(folder):
        os.utime(path, (0, 0))
    told: list[tuple[int, int]] = []

    await sweep(conn, store, age=WEEK, progress=lambda looked, gone: told.append((looked, gone)))

    assert told == [(2, 2), (4, 4), (5, 5)]
    assert objects_in(folder) == []
