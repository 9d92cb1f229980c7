"""The kit for users' own tests: real parts, services that answer as told, and a clock that a test moves."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from contracts.codec import Codec, Sealing
from orchestrator import hours, minutes, seconds
from orchestrator.objects.files import FileStore
from orchestrator.objects.kept import Kept
from orchestrator.objects.large import Large
from orchestrator.testing import clock
from orchestrator.testing.databases import Databases
from orchestrator.testing.installation import Installation, Unexpected, installed
from tests.invariants import at_rest
from tests.testing.flows import Charge, Charged, Collected, Refund, Ship, buy, doubtful, patient

Waypost = Callable[..., AbstractAsyncContextManager[Installation]]
PAID = Charged(charge="c1")


@pytest.mark.parametrize("in_answer", [False, True])
async def test_a_saga_runs_with_services_that_reply_refuse_and_undo(
    waypost: Waypost, in_answer: bool
) -> None:
    async with waypost(buy) as here:
        bank = await here.service("bank", in_answer=in_answer)
        carrier = await here.service("carrier", in_answer=in_answer)
        bank.on(Charge).replies(PAID)
        bank.on(Refund).replies()
        carrier.on(Ship).replies("T1").refuses("closed")
        good = await here.ended(await here.start(buy, "A"))
        bad = await here.ended(await here.start(buy, "B"))

        assert (good.row.status, good.output) == ("completed", "c1 T1")
        assert bad.row.status == "compensated"
        assert bank.did(Charge) == [Charge(order="A"), Charge(order="B")]
        assert bank.did(Refund) == [Refund(order="B", charge="c1")]
        assert await at_rest(here.conn) == []


async def test_what_goes_wrong_on_the_way_is_tried_again_and_charged_once(waypost: Waypost) -> None:
    async with waypost(doubtful) as here:
        bank = await here.service("bank")
        bank.on(Charge).answers(500).answers(429, retry_after=1).cuts().loses_reply(PAID)
        execution = await here.start(doubtful, "A")
        # What is cut on a kept connection is sent at once again, within the same try.
        for tries, requests in ((1, 1), (2, 2), (3, 4)):
            await bank.gets(Charge, times=requests)
            await here.until(lambda tries=tries: settled(here, tries), what=f"try {tries} to be recorded")
            await here.passes(seconds(30))
        view = await here.ended(execution)

        assert view.output == "c1"
        assert len({got.id for got in bank.got}) == 1
        assert len(bank.got) == 5
        assert len(bank.did(Charge)) == 1


async def settled(here: Installation, tries: int) -> bool:
    rows = await here.conn.execute(
        "select count(*) from waypost.outbox where attempts = %s and state = 'due'", (tries,)
    )
    row = await rows.fetchone()
    return row == (1,)


async def test_a_reply_comes_when_the_test_says_so_and_twice_is_once(waypost: Waypost) -> None:
    async with waypost(buy) as here:
        bank, carrier = await here.service("bank"), await here.service("carrier")
        held = bank.on(Charge).waits()
        carrier.on(Ship).replies("T1", twice=True)
        execution = await here.start(buy, "A")
        assert (await held.arrived()).data == {"order": "A"}
        assert (await here.client.show(execution)).row.state == "waiting"
        held.replies(PAID)
        view = await here.ended(execution)

        assert view.output == "c1 T1"
        assert [fact.kind for fact in view.facts].count("ended") == 2


async def test_days_pass_when_told_and_no_worker_loses_its_lease(waypost: Waypost) -> None:
    async with waypost(patient) as here:
        collected = await here.start(patient, "A")
        late = await here.start(patient, "B")
        for execution in (collected, late):
            await here.asks(execution, "sleep")
        await here.passes(hours(25))
        for execution in (collected, late):
            await here.asks(execution, Collected.type_)
        await here.receives(Collected(order="A"))
        view = await here.ended(collected)
        await here.passes(hours(13))
        failed = await here.ended(late)

        assert view.output == "collected"
        assert view.facts[-1].at - view.facts[0].at >= hours(25)
        assert (failed.error or {})["code"] == "timed-out"
        rows = await here.conn.execute("select count(*) from waypost.worker")
        assert await rows.fetchone() == (1,)
        assert await at_rest(here.conn) == []


async def test_a_command_that_nobody_answers_is_unknown_when_its_time_is_over(waypost: Waypost) -> None:
    async with waypost(doubtful) as here:
        bank = await here.service("bank")
        bank.on(Charge).stays_silent()
        execution = await here.start(doubtful, "A")
        await bank.gets(Charge)
        await here.asks(execution, "charge")
        await here.passes(minutes(6))

        assert (await here.ended(execution)).output == "nobody knows"


async def test_a_command_without_a_script_fails_the_test_and_says_which(waypost: Waypost) -> None:
    with pytest.raises(Unexpected, match=r"bank got bank.charge: expected a script, `service.on"):
        async with waypost(doubtful) as here:
            bank = await here.service("bank")
            await here.start(doubtful, "A")
            await bank.gets(Charge)
            await here.until(lambda: noticed(here), what="it to be noticed")


async def test_who_waits_for_an_end_hears_of_a_command_without_a_script_before_patience_ends(
    waypost: Waypost,
) -> None:
    with pytest.raises(Unexpected, match=r"bank got bank.charge"):
        async with waypost(doubtful) as here:
            await here.service("bank")
            await here.ended(await here.start(doubtful, "A"), seconds=3600)


async def noticed(here: Installation) -> bool:
    return bool(here.services["bank"].unexpected)


async def test_time_goes_on_only(waypost: Waypost) -> None:
    async with waypost(doubtful) as here:
        with pytest.raises(ValueError, match="time goes on only"):
            await here.passes(timedelta(0))


async def test_all_the_database_s_times_are_of_one_clock(waypost_database: str) -> None:
    async with await psycopg.AsyncConnection.connect(waypost_database, autocommit=True) as conn:
        await clock.move(conn, hours(100))
        rows = await conn.execute(
            "select p.proname from pg_catalog.pg_proc p where p.pronamespace = 'waypost'::regnamespace"
            " and p.proconfig::text ~ 'search_path' and p.proconfig::text !~ 'waypost_clock'"
        )
        assert await rows.fetchall() == []
        rows = await conn.execute(
            "insert into waypost.tenant (tenant_id, name) values (7, 'x')"
            " returning created_at > pg_catalog.now() + interval '99 h'"
        )
        assert await rows.fetchone() == (True,)


async def test_the_parts_may_be_processes(waypost_databases: Databases) -> None:
    async with installed(
        modules=["tests.testing.flows"], databases=waypost_databases, processes=True
    ) as here:
        bank, carrier = await here.service("bank"), await here.service("carrier")
        bank.on(Charge).replies(PAID)
        carrier.on(Ship).replies("T1")
        sleeping = await here.start(patient, "A")
        view = await here.ended(await here.start(buy, "A"))
        await here.asks(sleeping, "sleep")
        await here.passes(hours(49))
        over = await here.ended(sleeping)

        assert view.output == "c1 T1"
        assert (over.error or {})["code"] == "deadline"


@pytest.mark.proof
async def test_processes_and_services_of_the_kit_send_and_get_data_that_are_too_large_for_a_message(
    waypost_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAYPOST_PAYLOAD_STORE", (tmp_path / "objects").as_uri())
    monkeypatch.setenv("WAYPOST_PAYLOAD_KEYS", f"one:{base64.b64encode(bytes(32)).decode()}")
    monkeypatch.setattr(Large, "kept", Kept(FileStore(tmp_path / "objects")))
    monkeypatch.setattr(Sealing, "codec", Codec([("one", bytes(32))], os.urandom))
    order = "A" * 300_000
    async with installed(
        modules=["tests.testing.flows"], databases=waypost_databases, processes=True
    ) as here:
        bank, carrier = await here.service("bank"), await here.service("carrier", in_answer=True)
        bank.on(Charge).replies(PAID)
        bank.on(Refund).replies()
        carrier.on(Ship).refuses("closed")
        view = await here.ended(await here.start(buy, order))

        assert view.row.status == "compensated"
        assert bank.did(Charge) == [Charge(order=order)]
        assert bank.did(Refund) == [Refund(order=order, charge="c1")]
        assert carrier.did(Ship) == [Ship(order=order)]
        rows = await here.conn.execute("select max(octet_length(body)) < 4096 from waypost.outbox")
        assert await rows.fetchone() == (True,)


def test_no_part_of_the_kit_but_its_plugin_needs_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None; import orchestrator.testing, orchestrator.testing.installation;"
        "from orchestrator.testing import FlowTester"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
