"""No loss, no double: fifty sagas, while everything but the database and the services is killed again and again."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from orchestrator.client import ExecutionView
from orchestrator.store.reading import FactRow
from tests.acceptance.book import Book
from tests.acceptance.nemesis import Nemesis
from tests.acceptance.stand import LEDGER, Stand, stand
from tests.invariants import broken

SAGAS: Final = 50
HITS_MIN: Final = 30
TROUBLE: Final = 0.25
"""Of all first and second arrivals: refused for now, or acted on and then answered by an error or not at all."""

FATES: Final = {
    "order": ("completed", ["done stock.reserve", "done payment.charge", "done shipment.create"]),
    "declined": ("compensated", ["done stock.reserve", "refused payment.charge", "undone stock.release"]),
    "undeliverable": (
        "compensated",
        [
            "done stock.reserve",
            "done payment.charge",
            "refused shipment.create",
            "undone payment.refund",
            "undone stock.release",
        ],
    ),
}
"""How an order ends and what the services did for it, by the first word of its name. Every timeout is longer
than the test, so that no outcome stays unknown."""


def names() -> list[str]:
    """A third of the orders is declined at charge; every tenth, if not, is refused at the very end."""
    kinds = ["declined" if n % 3 == 0 else "undeliverable" if n % 10 == 1 else "order" for n in range(SAGAS)]
    return [f"{kind}-{n}" for n, kind in enumerate(kinds)]


def test_the_ledger_shares_no_code_with_us() -> None:
    tree = ast.parse(LEDGER.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)]
    names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]

    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"standardwebhooks"}


@pytest.mark.timeout(240)
async def test_no_loss_no_double(dsn: str, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    roles = ("receiver", "relay", "worker", "worker")
    ledger = ("--seed", str(seed), "--trouble", str(TROUBLE), "--ponder", "1")
    async with stand(dsn, tmp_path, roles=roles, ledger_options=ledger) as it, asyncio.TaskGroup() as returns:
        starts = Starts(it, chance.sample(names(), SAGAS))
        nemesis = Nemesis(it, returns, chance, starts.keep_some_open)
        while nemesis.hits.total() < HITS_MIN:
            await starts.up_to(SAGAS * nemesis.hits.total() / HITS_MIN)
            await nemesis.round()
        await starts.up_to(SAGAS)
        await nemesis.rest()
        views = await it.ended(*names())

        proven = await proven_hits(it, nemesis)
        print(proven, summary(it.book()))  # noqa: T201  # what it took, in the report of a failure
        assert proven.total() >= HITS_MIN
        assert await broken(it.conn, at_rest=True) == []
        assert await it.one(UNREAD) == 0
        await assert_messages_arrived_as_they_were_committed(it)
    for view in views:
        assert_the_saga_ended_as_it_should(view, it.book())
        assert_the_journal_agrees(view)
    assert_replies_were_the_same_bytes_until_taken(it.book())


@dataclass(slots=True)
class Starts:
    """Starts the orders by and by, so that there is work to hit until the end."""

    stand: Stand
    waiting: list[str]

    async def up_to(self, number: float) -> None:
        """Have so many started, of all."""
        while self.waiting and SAGAS - len(self.waiting) < number:
            await self._start()

    async def keep_some_open(self) -> None:
        if self.waiting and await self.stand.one(OPEN) < OPEN_MIN:
            await self._start()

    async def _start(self) -> None:
        order = self.waiting.pop()
        await self.stand.order(order, flow="order" if order.endswith(("2", "5", "8")) else "weighed")


OPEN: Final = "select count(*) from waypost.execution where finished_at is null"
OPEN_MIN: Final = 2


async def proven_hits(it: Stand, nemesis: Nemesis) -> Counter[str]:
    """The kills that left traces of work that they interrupted, no more than were counted at the time.

    Of a worker: executions that were taken over. Of a relay: tries that nobody settled and wrote down. Of a
    receiver: replies that were sent whole, and whose connection ended without an answer.
    """
    cut = sum(post.sent and post.status is None for post in it.book().posts)
    traces = Counter(worker=await it.one(ORPHANED), relay=await it.one(UNSETTLED), receiver=cut)
    return nemesis.hits & traces


ORPHANED: Final = "select count(*) from waypost.journal where kind = 'orphaned'"
UNSETTLED: Final = "select sum(attempts)::int - (select count(*) from waypost.delivery) from waypost.outbox"
UNREAD: Final = "select count(*) from waypost.execution where mail_received > mail_read"

COMMITTED: Final = """
    select message_id, body, attempts
      from waypost.outbox
     where state <> 'withdrawn'
"""


async def assert_messages_arrived_as_they_were_committed(it: Stand) -> None:
    """Each under one identity, with identical bytes; and nothing else arrived."""
    book = it.book()
    rows = await (await it.conn.execute(COMMITTED)).fetchall()
    committed: dict[str, tuple[bytes, int]] = {str(message): (body, tries) for message, body, tries in rows}
    arrived = Counter(arrival.id for arrival in book.arrivals)
    keys = {arrival.event["idempotencykey"]: arrival.id for arrival in book.arrivals}

    assert book.unproven == []
    assert set(arrived) == set(committed)
    for arrival in book.arrivals:
        assert arrival.event["id"] == arrival.id
        assert arrival.sha256 == hashlib.sha256(committed[arrival.id][0]).hexdigest()
        assert arrival.headers["idempotency-key"] == arrival.event["idempotencykey"]
    assert all(arrived[message] <= tries for message, (_, tries) in committed.items())
    assert sorted(keys.values()) == sorted(committed)


def assert_the_saga_ended_as_it_should(view: ExecutionView, book: Book) -> None:
    """Effects and undos happened once, in their order, exactly for what was done."""
    order = view.row.business_key or ""
    status, effects = FATES[order.partition("-")[0]]

    assert (order, view.row.status) == (order, status)
    assert (order, book.effects_of(order)) == (order, effects)


def assert_the_journal_agrees(view: ExecutionView) -> None:
    """Each ask ended once, undos in the reverse order of what they undo; the last fact is what the row says."""
    asked = [fact.path for fact in view.facts if fact.kind == "asked"]
    ended = [fact.path for fact in view.facts if fact.kind == "ended"]
    done = [fact.path for fact in view.facts if fact.kind == "ended" and said(fact)["outcome"] == "done"]
    steps = [path for path in done if not path.endswith("/undo")]
    undos = [path for path in done if path.endswith("/undo")]

    assert asked == ended
    assert [path for path in asked if not path.startswith("weigh")] == [
        message.path for message in view.messages
    ]
    assert undos == ([f"{path}/undo" for path in reversed(steps)] if view.row.status == "compensated" else [])
    assert all(message.state == "delivered" for message in view.messages)
    assert (view.facts[-1].kind, said(view.facts[-1])["kind"]) == ("finished", view.row.status)
    assert [fact.position for fact in view.facts] == list(range(1, view.row.position + 1))


def said(fact: FactRow) -> dict[str, Any]:
    return json.loads(fact.payload or "{}")


def assert_replies_were_the_same_bytes_until_taken(book: Book) -> None:
    by_command: dict[str, list[tuple[str, str, int | None]]] = {}
    for post in book.posts:
        by_command.setdefault(post.causation, []).append((post.id, post.sha256, post.status))

    assert set(by_command) == {arrival.id for arrival in book.arrivals}
    for posts in by_command.values():
        assert len({(reply, sha256) for reply, sha256, _ in posts}) == 1
        assert 202 in {status for *_, status in posts}
        assert {status for *_, status in posts} <= {202, 503, None}


def summary(book: Book) -> dict[str, int]:
    answers = Counter(answer for given in book.answers.values() for answer in given)
    return {
        "commands": len({arrival.id for arrival in book.arrivals}),
        "arrivals": len(book.arrivals),
        "answered badly": answers.total() - answers[202],
        "replies": len({post.id for post in book.posts}),
        "posts": len(book.posts),
        "posts cut": sum(post.sent and post.status is None for post in book.posts),
        "duplicates": sum(post.inbox == "duplicate" for post in book.posts),
    }
