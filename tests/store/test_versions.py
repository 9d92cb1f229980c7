"""Versions of flows in the database: which code one is, and how new executions are shared among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from orchestrator.store import definitions
from orchestrator.store.definitions import ChangedFlows, Definition
from tests.invariants import broken
from tests.store.world import Connection, event, posted, rows

pytestmark = pytest.mark.postgres

A, B = b"a" * 32, b"b" * 32


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def fingerprints(conn: Connection) -> list[bytes | None]:
    return [
        found for (found,) in await rows(conn, "select fingerprint from waypost.definition order by number")
    ]


# ---- which code ----------------------------------------------------------------------------------------------------


async def test_the_code_of_a_version_is_kept_when_it_becomes_known(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "1", fingerprint=A), Definition("order", "2")])

    assert await fingerprints(conn) == [A, None]


async def test_a_version_whose_code_was_not_known_gets_it_later(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "1")])
    await definitions.publish(conn, [Definition("order", "1", fingerprint=A)])
    await definitions.publish(conn, [Definition("order", "1")])

    assert await fingerprints(conn) == [A]


async def test_other_code_under_the_same_version_is_refused_and_nothing_is_written(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "1", fingerprint=A)])

    with pytest.raises(ChangedFlows, match="expected the code that order@1 had") as refused:
        await definitions.publish(
            conn, [Definition("new", "1", "paid", fingerprint=A), Definition("order", "1", fingerprint=B)]
        )

    assert refused.value.flows == ("order@1",)
    assert await rows(conn, "select name from waypost.definition") == [("order",)]
    assert await rows(conn, "select * from waypost.trigger") == []


async def test_other_code_that_is_accepted_is_that_of_the_version_from_then_on(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "1", fingerprint=A)])
    await definitions.publish(conn, [Definition("order", "1", fingerprint=B)], changed="accept")

    await definitions.publish(conn, [Definition("order", "1", fingerprint=B)])
    with pytest.raises(ChangedFlows):
        await definitions.publish(conn, [Definition("order", "1", fingerprint=A)])
    assert await fingerprints(conn) == [B]


async def test_a_worker_that_runs_already_passes_over_what_others_accepted(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "1", fingerprint=B)])

    await definitions.publish(conn, [Definition("order", "1", fingerprint=A)], changed="pass")

    assert await fingerprints(conn) == [B]


# ---- shares --------------------------------------------------------------------------------------------------------


async def share(conn: Connection, **percents: int) -> None:
    """Shares of versions of `order`: v2=10."""
    for version, percent in percents.items():
        await conn.execute(
            "insert into waypost.share (tenant_id, definition, version, percent) values (1, 'order', %s, %s)",
            (version.removeprefix("v"), percent),
        )


async def drawn(conn: Connection, type: str | None = None) -> dict[str | None, int]:  # noqa: A002
    """How often each version is drawn of a hundred."""
    found = await rows(
        conn, "select waypost.version_drawn(1, 'order', %s, n) from generate_series(0, 99) n", type
    )
    return dict(Counter(version for (version,) in found))


async def known(conn: Connection, *versions: str, on: str | None = None) -> None:
    await definitions.publish(conn, [Definition("order", version, on) for version in versions])


async def test_without_shares_the_newest_is_started(conn: Connection) -> None:
    await known(conn, "1", "2")

    assert await drawn(conn) == {"2": 100}


async def test_a_version_gets_its_share_and_the_newest_of_the_others_the_rest(conn: Connection) -> None:
    await share(conn, v3=10)
    await known(conn, "1", "2")
    assert await drawn(conn) == {"2": 100}

    await known(conn, "3")
    assert await drawn(conn) == {"2": 90, "3": 10}


async def test_several_versions_get_their_shares(conn: Connection) -> None:
    await known(conn, "1", "2", "3")
    await share(conn, v2=30, v3=20)

    assert await drawn(conn) == {"1": 50, "2": 30, "3": 20}


@pytest.mark.parametrize(("percent", "expected"), [(0, {"1": 100}), (100, {"2": 100})])
async def test_a_share_of_nothing_or_of_all(conn: Connection, percent: int, expected: dict[str, int]) -> None:
    await known(conn, "1", "2")
    await share(conn, v2=percent)

    assert await drawn(conn) == expected


async def test_shares_are_of_what_takes_starts_at_all(conn: Connection) -> None:
    """Without anybody for the rest, those with a share get it; a version that is retired gets nothing."""
    await known(conn, "1", "2")
    await share(conn, v1=10, v2=30)
    assert await drawn(conn) == {"1": 25, "2": 75}

    await conn.execute("update waypost.definition set state = 'retired' where version = '2'")
    assert await drawn(conn) == {"1": 100}


async def test_where_nothing_takes_starts_none_is_drawn(conn: Connection) -> None:
    assert await drawn(conn) == {None: 100}
    await known(conn, "1")
    await share(conn, v1=0)
    assert await drawn(conn) == {None: 100}


async def test_an_event_starts_the_versions_that_name_it(conn: Connection) -> None:
    """The newest names it no more, but it has a small share; the rest of the others still do."""
    await known(conn, "1", on="paid")
    await known(conn, "2", on="placed")
    assert await drawn(conn, "paid") == {None: 100}

    await share(conn, v2=10)
    assert await drawn(conn, "paid") == {"1": 100}
    assert await drawn(conn, "placed") == {"2": 100}


async def test_events_and_starts_are_shared_alike(conn: Connection) -> None:
    await known(conn, "1", "2", on="paid")
    await share(conn, v2=50)

    await posted(conn, *(event(f"e{n}", key=f"k{n}") for n in range(100)))
    for n in range(100):
        await conn.execute("select waypost.start('order', '{}', key => %s)", (f"s{n}",))

    found = await rows(
        conn,
        "select business_key ^@ 'k', version, count(*) from waypost.execution group by 1, 2 order by 1, 2",
    )
    assert [(by_event, version) for by_event, version, _ in found] == [
        (False, "1"),
        (False, "2"),
        (True, "1"),
        (True, "2"),
    ]
    assert all(20 < count < 80 for _, _, count in found), found
