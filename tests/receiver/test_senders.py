from __future__ import annotations

import asyncio

from contracts.limits import SENDERS_KEPT_MAX
from receiver.senders import Senders
from receiver.settings import ReceiverSettings
from tests.moments import Moments
from tests.receiver.world import OTHER, SECRET, VAULT, Connection, Pool, add_sender

NAME = ("default", "payments")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def senders(pool: Pool, clock: Clock) -> Senders:
    return Senders(pool, vault=VAULT, settings=ReceiverSettings(), observer=Moments(), clock=clock)


def asked(pool: Pool) -> int:
    return pool.get_stats().get("requests_num", 0)


async def test_a_sender_has_its_live_secrets_newest_first(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    await add_sender(conn, secret=OTHER, key_id="2")

    sender = await senders(pool, Clock()).get(NAME)

    assert sender is not None
    assert (sender.tenant_id, sender.name, sender.state) == (1, "payments", "enabled")
    assert sender.secrets == (OTHER, SECRET)


async def test_fifty_questions_at_once_are_one(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    known = senders(pool, Clock())
    before = asked(pool)

    answers = await asyncio.gather(*(known.get(NAME) for _ in range(50)))

    assert asked(pool) == before + 1
    assert len(set(map(id, answers))) == 1


async def test_a_changed_secret_counts_after_two_seconds(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    clock = Clock()
    known = senders(pool, clock)
    await known.get(NAME)
    await conn.execute("update waypost.sender set state = 'disabled'")

    clock.now = 1.9
    early = await known.get(NAME)
    clock.now = 2.0
    late = await known.get(NAME)

    assert early is not None
    assert late is not None
    assert (early.state, late.state) == ("enabled", "disabled")


async def test_an_unknown_name_is_remembered_for_half_a_second(pool: Pool, conn: Connection) -> None:
    clock = Clock()
    known = senders(pool, clock)
    assert await known.get(NAME) is None
    await add_sender(conn)
    before = asked(pool)

    clock.now = 0.4
    assert await known.get(NAME) is None
    assert asked(pool) == before
    clock.now = 0.5
    assert await known.get(NAME) is not None


async def test_names_that_strangers_try_do_not_fill_the_memory(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    known = senders(pool, Clock())
    known.kept.update({("default", f"stranger-{n}"): (1e9, None) for n in range(SENDERS_KEPT_MAX)})

    assert await known.get(NAME) is not None
    assert len(known.kept) <= SENDERS_KEPT_MAX


async def test_names_that_no_row_can_have_are_not_asked_for(pool: Pool, conn: Connection) -> None:
    known = senders(pool, Clock())
    before = asked(pool)

    for name in ("", "a\0b", "a\nb", "\udcff", "ü" * 65):
        assert await known.get(("default", name)) is None
        assert await known.get((name, "payments")) is None

    assert asked(pool) == before
    assert not known.kept
