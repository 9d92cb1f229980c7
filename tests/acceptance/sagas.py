"""Sagas of which it is known how each must end, and what must be true when all have ended."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from orchestrator.client import ExecutionView, NotOpen
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
    "approved": ("completed", [BOUGHT[0], "done shipment.create"]),
}
"""How an order ends, and what the services did for it, in this order."""

UNDOES: Final = {
    "stock.release": "stock.reserve",
    "payment.refund": "payment.charge",
    "label.void": "label.print",
    "stamp.return": "stamp.buy",
}


def standing(effects: list[Effect]) -> set[str] | None:
    """What was done and not undone; None when something was undone that was not done, or done although it was."""
    done: set[str] = set()
    barred: set[str] = set()
    for effect in effects:
        undoes = UNDOES.get(effect.type, "")
        match effect.what:
            case "done" if effect.type not in barred | done:
                done.add(effect.type)
            case "undone" if undoes in done:
                done.remove(undoes)
                barred.add(undoes)
            case "undone before done" | "nothing to undo" if undoes not in done:
                barred.add(undoes)
            case "refused":
                pass
            case _:
                return None
    return done


@dataclass(frozen=True, slots=True)
class Saga:
    """An order, the flow that it runs, and the fate that its name asks for.

    `unknown`: it did not wait for its charge, so that nobody can say whether that was done. `abreast` and
    `unabreast`: two steps side by side, of which none or one is refused. `cancelled`: it is, sooner or later.
    """

    order: str
    flow: str
    fate: str

    def ended_well(self, status: str, effects: list[Effect]) -> bool:
        """Whether each effect happened once, all in their order, exactly those of its fate."""
        did, stands = [str(effect) for effect in effects], standing(effects)
        bought = sorted(did[:2]) == sorted(BOUGHT) and did[2:] == ["done shipment.create"]
        match self.fate:
            case "unknown":
                return (status, did[0], did[-1], stands) == ("compensated", BOUGHT[0], RELEASED, set())
            case "abreast":
                return status == "completed" and bought
            case "unabreast":
                happened = {effect.what for effect in effects} != {"refused"}
                return (status, stands) == ("compensated" if happened else "failed", set())
            case "cancelled":
                undone = stands is not None and stands <= {"shipment.create"}
                return bought if status == "completed" else status == "cancelled" and undone
            case _:
                return (status, did) == FATES[self.fate]


Kind = tuple[str, str, str]
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
    ("late", "hasty", "unknown"),
    ("mute", "hasty", "unknown"),
    ("deaf", "hasty", "unknown"),
    ("order", "abreast", "abreast"),
    ("answered", "abreast", "abreast"),
    ("declined", "abreast", "unabreast"),
    ("approved", "approved", "approved"),
    ("approved", "approved", "approved"),
    ("cancelled", "order", "cancelled"),
    ("cancelled", "abreast", "cancelled"),
    ("order", "stamped", "stamped"),
    ("undeliverable", "stamped", "unstamped"),
    ("order", "stamped", "stamped"),
    ("undeliverable", "stamped", "unstamped"),
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
    to_cancel: list[Saga] = field(default_factory=list[Saga])
    cancelled: int = 0
    """Cancels that were acknowledged."""
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Strikes that come at once share the stand's one connection, and must not each start what is missing."""

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
        async with self._alone:
            return await self._feed(role)

    async def _feed(self, role: Role) -> bool:
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
        if saga.fate == "cancelled":
            self.to_cancel.append(saga)
        elif self.to_cancel and self.begun % CANCEL_EVERY == 0:
            await self._cancel(self.to_cancel.pop(0))

    async def cancel_the_rest(self) -> None:
        while self.to_cancel:
            await self._cancel(self.to_cancel.pop(0))

    async def _cancel(self, saga: Saga) -> None:
        with suppress(NotOpen):  # it was over before
            await self.stand.client.cancel(self.stand.started[saga.order], by="ann", reason="no reason")
            self.cancelled += 1


CANCEL_EVERY: Final = 3
"""Starts after which one saga is cancelled, so that each has come to another point by then."""

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
UNREAD: Final = "select business_key from waypost.execution where mail_received > mail_read"

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
    by_try = Counter((arrival.id, arrival.headers["waypost-attempt"]) for arrival in book.arrivals)
    tried = Counter(message for message, _ in by_try)
    assert all(tried[message] <= tries for message, (_, tries) in committed.items())
    assert max(by_try.values()) <= 2  # what is cut on a kept connection is sent once more within its try
    assert sorted(keys.values()) == sorted(arrived)


async def assert_no_mail_was_left_unread(it: Stand, all_sagas: Sequence[Saga]) -> None:
    """But by those that did not wait for all that they had asked for, and were over before it came."""
    unread = {order for (order,) in await (await it.conn.execute(UNREAD)).fetchall()}
    did_not_wait = {saga.order for saga in all_sagas if saga.fate in {"unknown", "unabreast", "cancelled"}}

    assert unread <= did_not_wait


def assert_the_saga_ended_as_it_should(saga: Saga, view: ExecutionView, book: Book) -> None:
    """Effects and undos happened once, in their order, exactly for what was done."""
    effects = [effect for effect in book.effects if effect.order == saga.order]
    keys = Counter(effect.key for effect in effects)

    assert saga.ended_well(view.row.status, effects), (saga, view.row.status, [*map(str, effects)])
    assert set(keys.values()) <= {1}  # nothing at all when it was cancelled at once


def assert_the_journal_agrees(view: ExecutionView) -> None:
    """Each ask is closed once, undos in the reverse order in which ended what they undo, nothing ordinary after a
    cancel; and the last fact is what the row says.
    """
    asked = [fact for fact in view.facts if fact.kind == "asked"]
    closed = {fact.path: closing(fact) for fact in view.facts if fact.kind in {"ended", "withdrawn"}}
    undos = [fact.path.removesuffix("/undo") for fact in asked if fact.path.endswith("/undo")]
    ended = [path for path, how in reversed(closed.items()) if how in {"done", "unknown"} and path in undos]
    states = {message.path: message.state for message in view.messages}
    after_cancel = view.facts[[*(fact.kind for fact in view.facts), "cancel_asked"].index("cancel_asked") :]

    assert sorted(fact.path for fact in asked) == sorted(closed)
    assert sorted(fact.path for fact in asked if said(fact)["args"].get("do") == "call") == sorted(states)
    assert [path for path in undos if closed[path] != "withdrawn"] == ended
    if view.row.status in {"compensated", "cancelled"}:
        assert set(undos) >= {path for path, how in closed.items() if how == "done" and is_undoable(path)}
    else:
        assert undos == []
    assert {closed[f"{path}/undo"] for path in undos} <= {"done"}
    assert {states[path] for path in states if closed[path] == "done"} <= {"delivered"}
    assert [it.path for it in after_cancel if it.kind == "asked" and not it.path.endswith("/undo")] == []
    assert (view.facts[-1].kind, said(view.facts[-1])["kind"]) == ("finished", view.row.status)
    assert [fact.position for fact in view.facts] == list(range(1, view.row.position + 1))


def closing(fact: FactRow) -> str:
    return "withdrawn" if fact.kind == "withdrawn" else said(fact)["outcome"]


def is_undoable(path: str) -> bool:
    """Whether the flows give it an undo: all steps but shipping, waiting, and undoing itself."""
    return path.rpartition("/")[2] not in {"create", "order%2Eapproved", "undo"}


def said(fact: FactRow) -> dict[str, Any]:
    return json.loads(fact.payload or "{}")


TAKEN_BACK: Final = """
    select o.message_id::text
      from waypost.outbox o
      join waypost.journal j using (tenant_id, execution_id, path)
     where j.kind = 'withdrawn'
"""


async def taken_back(it: Stand) -> set[str]:
    """Commands that nobody wanted any more before they were answered."""
    return {message for (message,) in await (await it.conn.execute(TAKEN_BACK)).fetchall()}


def assert_replies_were_the_same_bytes_until_taken(book: Book, *, unwanted: set[str]) -> None:
    """And none was missing, but those of a service that posts none, and some of commands that are `unwanted`."""
    by_command: dict[str, list[tuple[str, str, int | None]]] = {}
    for post in book.posts:
        by_command.setdefault(post.causation, []).append((post.id, post.sha256, post.status))
    posted = {arrival.id for arrival in book.arrivals if posts(arrival.event)} - unwanted

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
