"""Sagas of which it is known how each must end, and what must be true when all have ended."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.client import ExecutionView
from orchestrator.store.reading import FactRow
from tests.acceptance.book import Book, Effect
from tests.acceptance.nemesis import Nemesis
from tests.acceptance.stand import BOUGHT, DESKS, SERVICES, Role, Stand

TROUBLE: Final = 0.25
"""Of all first and second arrivals: refused for now, or acted on and then answered by an error or not at all."""

RELEASED: Final = "undone stock.release"
RETURNED: Final = ["undone payment.refund", RELEASED]

FATES: Final = {
    "bought": ("completed", [*BOUGHT, "done shipment.create"]),
    "declined": ("compensated", [BOUGHT[0], "refused payment.charge", RELEASED]),
    "undeliverable": ("compensated", [*BOUGHT, "refused shipment.create", *RETURNED]),
    "unprocessable": ("compensated", [*BOUGHT, *RETURNED]),
    "stamped": (
        "completed",
        [BOUGHT[0], "done label.print", "done stamp.buy", "done shipment.create"],
    ),
    "unstamped": (
        "compensated",
        [
            BOUGHT[0],
            "done label.print",
            "done stamp.buy",
            "refused shipment.create",
            "undone stamp.return",
            "undone label.void",
            RELEASED,
        ],
    ),
}
"""How an order ends, and what the services did for it."""

UNKNOWN: Final[tuple[list[str], ...]] = (
    [],
    ["done payment.charge", "undone payment.refund"],
    ["undone before done payment.refund"],
)
"""What may be between the reservation and its release of an order that did not wait for its charge: it was never
sent, or it was done, or it never came. It may have been refused, too, once nobody waited for it."""


@dataclass(frozen=True, slots=True)
class Saga:
    """An order, by the flow that it runs and the fate that its name asks for; `fate` None: see UNKNOWN."""

    order: str
    flow: str
    fate: str | None

    def ended_well(self, status: str, effects: list[Effect]) -> bool:
        """Whether each effect happened once, all in their order, exactly those of its fate."""
        did = [str(effect) for effect in effects]
        if self.fate is not None:
            return (status, did) == FATES[self.fate]
        counted = [it for it in did if it not in {"refused payment.charge", "nothing to undo payment.refund"}]
        return status == "compensated" and counted in [[BOUGHT[0], *it, RELEASED] for it in UNKNOWN]


Kind = tuple[str, str, str | None]
"""First word of the order's name, flow and fate."""

KINDS: Final[tuple[Kind, ...]] = (
    ("order", "order", "bought"),
    ("order", "weighed", "bought"),
    ("twice", "order", "bought"),
    ("answered", "order", "bought"),
    ("answered", "weighed", "bought"),
    ("both", "weighed", "bought"),
    ("busy", "order", "bought"),
    ("throttled", "weighed", "bought"),
    ("broken", "order", "bought"),
    ("confused", "weighed", "bought"),
    ("cut", "order", "bought"),
    ("silent", "weighed", "bought"),
    ("declined", "order", "declined"),
    ("declined", "weighed", "declined"),
    ("undeliverable", "weighed", "undeliverable"),
    ("unprocessable", "order", "unprocessable"),
    ("late", "hasty", None),
    ("mute", "hasty", None),
    ("deaf", "hasty", None),
    ("order", "stamped", "stamped"),
    ("undeliverable", "stamped", "unstamped"),
    ("order", "stamped", "stamped"),
    ("undeliverable", "stamped", "unstamped"),
)
"""Every way in which a service may behave. Every timeout but that of `hasty` is longer than a test, so that no other
outcome stays unknown."""

FEW_KINDS: Final[tuple[Kind, ...]] = (
    ("declined", "order", "declined"),
    ("undeliverable", "weighed", "undeliverable"),
    ("order", "order", "bought"),
    ("declined", "weighed", "declined"),
    ("order", "weighed", "bought"),
    ("order", "weighed", "bought"),
)


def sagas(number: int, kinds: Sequence[Kind]) -> list[Saga]:
    """So many, of each kind about as many as of the next."""
    drawn = [(*kinds[n % len(kinds)], n) for n in range(number)]
    return [Saga(f"{word}-{n}", flow, fate) for word, flow, fate, n in drawn]


@dataclass(slots=True)
class Starts:
    """Starts the orders by and by, so that there is work to hit until the end."""

    stand: Stand
    all: list[Saga]
    waiting: list[Saga]
    """Those that are not started yet; the last one is next."""
    open_min: int = 2

    @property
    def begun(self) -> int:
        return len(self.all) - len(self.waiting)

    async def up_to(self, part: float) -> None:
        """Have this part of all (of 1) started."""
        while self.waiting and self.begun < part * len(self.all):
            await self._start(self.waiting[-1])

    async def feed(self, role: Role) -> bool:
        """See to it that parts of that role have work: any, or, if they are desks, what only they do. False when
        there is none left.
        """
        number = await self.stand.one(OPEN, None, None)
        if self.waiting and number < self.open_min:
            await self._start(self.waiting[-1])
        if role != "desk":
            return bool(self.waiting or number)
        able = [saga for saga in self.waiting if saga.flow == "stamped"]
        number = await self.stand.one(OPEN, "stamped", "stamped")
        if able and number < STAMPED_OPEN_MIN:
            await self._start(able[-1])
        return bool(able or number)

    async def _start(self, saga: Saga) -> None:
        self.waiting.remove(saga)
        await self.stand.order(saga.order, flow=saga.flow)


STAMPED_OPEN_MIN: Final = 3
"""One whose desk was struck several times is not sent again for half a minute."""

OPEN: Final = """
    select count(*)
      from waypost.execution
     where finished_at is null
       and (%s::text is null or definition = %s)
"""


async def proven_hits(it: Stand, nemesis: Nemesis) -> Counter[str]:
    """The kills that left traces of work that they interrupted, no more than were counted at the time.

    Of a worker: executions that were taken over. Of a relay: tries that nobody settled and wrote down. Of a
    receiver: replies that were sent whole, and whose connection ended without an answer. Of a desk: runs of
    which the next one was told that they may have acted.
    """
    traces = Counter(
        worker=await it.one(ORPHANED),
        relay=await it.one(UNSETTLED),
        receiver=sum(post.is_cut for post in it.book().posts),
        desk=sum(what == "again" for name in DESKS for _, what, _ in it.runs(name)),
    )
    return nemesis.hits & traces


ORPHANED: Final = "select count(*) from waypost.journal where kind = 'orphaned'"
UNSETTLED: Final = "select sum(attempts)::int - (select count(*) from waypost.delivery) from waypost.outbox"
UNREAD: Final = "select count(*) from waypost.execution where mail_received > mail_read"

COMMITTED: Final = """
    select message_id, body, attempts, state
      from waypost.outbox
     where endpoint = any(%s)
"""


async def assert_messages_arrived_as_they_were_committed(it: Stand) -> None:
    """Each under one identity, with identical bytes; and nothing else arrived."""
    book = it.book()
    rows = await (await it.conn.execute(COMMITTED, (list(SERVICES),))).fetchall()
    committed = {str(message): (body, tries) for message, body, tries, _ in rows}
    delivered = {str(message) for message, *_, state in rows if state in {"delivered", "refused"}}
    withdrawn = {str(message) for message, *_, state in rows if state == "withdrawn"}
    arrived = Counter(arrival.id for arrival in book.arrivals)
    keys = {arrival.event["idempotencykey"]: arrival.id for arrival in book.arrivals}

    assert book.unproven == []
    assert delivered <= set(arrived) <= set(committed) - withdrawn
    for arrival in book.arrivals:
        assert arrival.event["id"] == arrival.id
        assert arrival.sha256 == hashlib.sha256(committed[arrival.id][0]).hexdigest()
        assert arrival.headers["idempotency-key"] == arrival.event["idempotencykey"]
    assert all(arrived[message] <= tries for message, (_, tries) in committed.items())
    assert sorted(keys.values()) == sorted(arrived)


def assert_the_saga_ended_as_it_should(saga: Saga, view: ExecutionView, book: Book) -> None:
    """Effects and undos happened once, in their order, exactly for what was done."""
    effects = [effect for effect in book.effects if effect.order == saga.order]
    keys = Counter(effect.key for effect in effects)

    assert saga.ended_well(view.row.status, effects), (saga, view.row.status, [*map(str, effects)])
    assert set(keys.values()) == {1}


def assert_the_journal_agrees(view: ExecutionView) -> None:
    """Each ask ended once, undos in the reverse order of what they undo; the last fact is what the row says."""
    asked = [fact.path for fact in view.facts if fact.kind == "asked"]
    ended = {fact.path: said(fact)["outcome"] for fact in view.facts if fact.kind == "ended"}
    undos = [path for path in ended if path.endswith("/undo")]
    stands = [path for path in reversed(ended) if path not in undos and ended[path] in {"done", "unknown"}]
    undoable = [path for path in stands if ended[path] == "done" or f"{path}/undo" in undos]
    states = {message.path: message.state for message in view.messages}

    assert asked == [fact.path for fact in view.facts if fact.kind == "ended"]
    assert [path for path in asked if not path.startswith("weigh")] == list(states)
    assert undos == ([f"{path}/undo" for path in undoable] if view.row.status == "compensated" else [])
    assert {ended[path] for path in undos} <= {"done"}
    assert {states[path] for path in states if ended[path] == "done"} == {"delivered"}
    assert (view.facts[-1].kind, said(view.facts[-1])["kind"]) == ("finished", view.row.status)
    assert [fact.position for fact in view.facts] == list(range(1, view.row.position + 1))


def said(fact: FactRow) -> dict[str, Any]:
    return json.loads(fact.payload or "{}")


def assert_replies_were_the_same_bytes_until_taken(book: Book) -> None:
    """And no reply but those of a service that posts none was missing."""
    by_command: dict[str, list[tuple[str, str, int | None]]] = {}
    for post in book.posts:
        by_command.setdefault(post.causation, []).append((post.id, post.sha256, post.status))
    posted = {arrival.id for arrival in book.arrivals if posts(arrival.event)}

    assert posted <= set(by_command) <= {arrival.id for arrival in book.arrivals}
    for tries in by_command.values():
        assert len({(reply, sha256) for reply, sha256, _ in tries}) == 1
        assert 202 in {status for *_, status in tries}
        assert {status for *_, status in tries} <= {202, 503, None}


def posts(command: dict[str, Any]) -> bool:
    """Whether the ledger posts a reply to `command`, sooner or later."""
    word, kind = command["data"]["order"].partition("-")[0], command["type"]
    return word != "answered" and (word, kind) not in {
        ("mute", "payment.charge"),
        ("deaf", "payment.charge"),
        ("late", "payment.charge"),  # it depends
        ("unprocessable", "shipment.create"),
    }


def summary(book: Book) -> dict[str, int]:
    answers = Counter(answer for given in book.answers.values() for answer in given)
    return {
        "commands": len({arrival.id for arrival in book.arrivals}),
        "arrivals": len(book.arrivals),
        "answered badly": answers.total() - answers[202] - answers[200],
        "replies in answers": answers[200],
        "replies posted": len({post.id for post in book.posts}),
        "posts": len(book.posts),
        "posts cut": sum(post.is_cut for post in book.posts),
        "duplicates": sum(post.inbox == "duplicate" for post in book.posts),
    }


def counted(of: dict[str, int] | Counter[str]) -> str:
    """Counts as people read them."""
    return ", ".join(f"{name} {number}" for name, number in of.items())
