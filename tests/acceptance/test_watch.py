"""The watch of the long proof sees what it is there to see."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.acceptance.stand import Role
from tests.acceptance.watch import MAY_HOLD, Watch, watching
from tests.cli.processes import ROOT
from tests.store.world import begun
from tests.waiting import until_true


@contextmanager
def watched(dsn: str, role: Role, *names: str) -> Generator[Watch]:
    """What is seen of a process of that role, which holds a connection of each of these names."""
    port = int(str(conninfo_to_dict(dsn)["port"]))
    with ExitStack() as held, watching(dsn, port, lambda: {os.getpid(): ("it", role)}) as watch:
        for name in names:
            held.enter_context(psycopg.connect(dsn, application_name=name))
        looks = watch.looks
        until_true(lambda: watch.looks > looks + 2, what="two looks")
        yield watch


def test_as_many_connections_as_the_documents_allow_are_no_excess(dsn: str) -> None:
    allowed = [name for name, number in MAY_HOLD["receiver"].items() for _ in range(number)]
    with watched(dsn, "receiver", *allowed[1:]) as watch:  # one is the watch's own
        assert (watch.excess, watch.most) == ([], {"receiver": 5})


def test_one_connection_more_is_an_excess(dsn: str) -> None:
    with watched(dsn, "receiver", *["waypost-receiver"] * 5) as watch:
        assert "5 connections named 'waypost-receiver', expected at most 4" in watch.excess[0]


def test_one_of_a_name_that_a_part_does_not_use_is_an_excess(dsn: str) -> None:
    with watched(dsn, "relay", "waypost-lease") as watch:
        assert "1 connections named 'waypost-lease', expected at most 0" in watch.excess[0]


def test_sockets_that_the_server_does_not_list_are_an_excess(dsn: str) -> None:
    with watched(dsn, "receiver", *[""] * 7) as watch:
        assert "connections, expected at most 6" in watch.excess[0]


async def test_what_is_stuck_is_seen(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await begun(conn)
        await conn.execute("update waypost.execution set wake_at = null")
    with watched(dsn, "receiver") as watch:
        assert watch.stuck[0].endswith(" no-reason")


def test_the_documents_say_how_many_connections_each_part_holds() -> None:
    text = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    said = re.search(r"a worker holds at most (\d+) connections, a relay (\d+) and a receiver (\d+)", text)
    assert said is not None
    assert [int(number) for number in said.groups()] == [
        sum(MAY_HOLD[role].values()) for role in ("worker", "relay", "receiver")
    ]
