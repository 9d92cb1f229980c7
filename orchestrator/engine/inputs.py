"""What an execution got, as facts: mail in order of arrival, timers by due time, merged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from contracts import strict_json
from contracts.errors import MalformedJson, NotEncodable, TooLarge
from contracts.limits import SHOWN_CHARACTERS_MAX
from contracts.outcome import Outcome
from orchestrator.core.errors import MESSAGE_OUTCOMES, STOPPING, Halt, storable
from orchestrator.core.fact import BYSTANDERS, Fact
from orchestrator.core.machine import Machine
from orchestrator.store.executions import Mail

Json = Any

RESULTS_OF: Final = {"waypost:task": "tasks", "waypost:mutex": "mutex"}
"""Who says what became of something, by the source of its mail; else it is the relay."""


@dataclass(slots=True)
class Inputs:
    """The unread mail of an execution, and how much of it has become facts.

    `acted` are numbers of orders that were obeyed before their turn (a resume must come before everything
    else that a stopped execution got); they are passed when their turn comes. `noted` are those that were
    written down before it. `filled` are paths of waits for which an event has come.
    """

    unread: deque[Mail] = field(default_factory=deque[Mail])
    acted: set[int] = field(default_factory=set[int])
    noted: set[int] = field(default_factory=set[int])
    filled: set[str] = field(default_factory=set[str])
    mail: int = 0
    orders: int = 0
    guard: bool = False
    _taken: list[Mail] = field(default_factory=list[Mail])
    _early: set[int] = field(default_factory=set[int])

    def add(self, mail: Sequence[Mail]) -> None:
        self.unread.extend(mail)
        self.filled.update(one.path for one in mail if one.kind == "event" and one.path is not None)

    def committed(self) -> None:
        """What was counted is stored; counting begins anew."""
        self.mail = self.orders = 0
        self.guard = False
        self._taken.clear()
        self._early.clear()

    def unread_again(self) -> Inputs:
        """As if nothing had been read or obeyed since the last commit."""
        unread = deque([*self._taken, *self.unread])
        return Inputs(unread, self.acted - self._early, self.noted, self.filled)

    def feed(self, machine: Machine, now: datetime, *, most: int | None = None) -> None:
        """Tell `machine` all that has come, at most `most` inputs: mail by arrival, timers by due time. Orders are
        always read to the last one, since nothing may be asked after one that was acknowledged.

        Mail comes before a timer on a tie, and the reply to an ask always before that ask's own timeout,
        however late we are: knowledge beats a guess. A decision of a person is none, and comes in time or not.
        When things came only decides their order; what the program is told, and what its next timeouts count
        from, is `now`.
        """
        self._note_orders(machine, now)
        told = 0
        while not machine.continues and (
            most is None or told < most or any(mail.kind == "order" for mail in self.unread)
        ):
            due = machine.next_due()
            fires = due is not None and due[0] <= now
            if self.unread and not (fires and due is not None and self._fires_first(due)):
                self._take(machine, now)
            elif fires and due is not None:
                found = machine.open.get(due[1])
                self.guard = self.guard or (
                    found is not None and (found[1].is_sent or found[1].is_decision or found[1].is_child)
                )
                machine.fire(now)
            else:
                return
            told += 1

    def _note_orders(self, machine: Machine, now: datetime) -> None:
        """Write down what a person decided about what is held, before an earlier answer makes it needless."""
        if machine.held is None:
            return
        for mail in list(self.unread)[1:]:
            decides = mail.kind == "order" and mail.path == machine.held.path
            if decides and mail.number not in self.noted:
                self.noted.add(mail.number)
                data = said(mail)
                by, words = order_words(data)
                order = {
                    name: storable(str(data.get(name))) for name in ("order", "verdict") if data.get(name)
                }
                machine.remark(
                    "ordered", mail.path or "", words | order | {"mail": mail.number}, now, actor=by
                )

    def resume(self) -> Mail | None:
        """The order to resume that nobody has obeyed yet; it counts as obeyed from now on."""
        for mail in self.unread:
            if mail.kind == "order" and mail.number not in self.acted and said(mail).get("order") == "resume":
                self.act(mail)
                return mail
        return None

    def refuse_orders(self) -> list[Mail]:
        """Every order that nobody has obeyed; they count as obeyed from now on."""
        orders = [mail for mail in self.unread if mail.kind == "order" and mail.number not in self.acted]
        for mail in orders:
            self.act(mail)
        return orders

    def act(self, mail: Mail) -> None:
        self.acted.add(mail.number)
        self._early.add(mail.number)
        self.orders += 1

    def _fires_first(self, due: tuple[datetime, str]) -> bool:
        at, path = due
        replied = any(mail.path == path and mail.kind not in ("event", "order") for mail in self.unread)
        return at < self.unread[0].received_at and not replied

    def _take(self, machine: Machine, now: datetime) -> None:
        mail = self.unread[0]
        before = len(machine.new)
        try:
            tell(machine, mail, now, obeyed=mail.number in self.acted)
        except Halt:
            if len(machine.new) > before:
                self._read()
            raise
        self._read()

    def _read(self) -> None:
        mail = self.unread.popleft()
        self._taken.append(mail)
        self.mail += 1
        if mail.kind == "order" and mail.number not in self.acted:
            self.orders += 1


def tell(machine: Machine, mail: Mail, now: datetime, *, obeyed: bool) -> None:
    """One piece of mail as one fact. What does not fit is `late`, or has no effect; it never fails."""
    data = said(mail)
    if mail.kind == "order" and data.get("order") == "cancel":
        by, words = order_words(data)  # also one that found its execution stopped: it was counted, not obeyed
        machine.tell("cancel_asked", "", words | {"undo": data.get("undo") is not False}, now, actor=by)
    elif mail.kind == "order" and data.get("order") == "decide":
        tell_decision(machine, mail, data, now)
    elif mail.kind == "order":
        if not obeyed:
            tell_order(machine, mail, data, now)
    elif mail.kind == "event":
        tell_event(machine, mail, now)
    elif mail.kind == "child":
        tell_child(machine, mail, data, now)
    elif mail.kind in ("reply", "result"):
        who = (
            f"participant:{mail.sender}"
            if mail.kind == "reply"
            else RESULTS_OF.get(mail.source or "", "relay")
        )
        if mail.epoch == machine.epoch:
            tell_outcome(machine, "ended", mail.path or "", data, now, actor=who)
        else:  # of what was asked before it continued as new; no path of now may be taken for it
            tell_outcome(machine, "late", f"epoch:{mail.epoch}/{mail.path or ''}", data, now, actor=who)


def tell_event(machine: Machine, mail: Mail, now: datetime) -> None:
    """An event that the execution waits for, or waited for when it came. One whose data no journal can hold counts
    as received without data, so that whoever waits for it learns that it does not fit.
    """
    known: dict[str, Json] = {
        "type": mail.type,
        "key": mail.key,
        "source": mail.source,
        "id": mail.event_id,
    }
    actor = f"sender:{mail.sender}"
    try:
        data: Json = strict_json.decode(mail.data or "null", what=f"mail {mail.number}")
        machine.tell("received", "", known | {"data": data}, now, actor=actor)
    except (MalformedJson, NotEncodable, TooLarge) as error:
        unfit = {"code": error.code, "detail": storable(str(error))}
        machine.tell("received", "", known | {"data": None, "unfit": unfit}, now, actor=actor)


def tell_order(machine: Machine, mail: Mail, data: dict[str, Json], now: datetime) -> None:
    """An order of an operator, with its name and reason. What it decides may be too large to be stored (the
    undo that a given reply makes exact, say); then it decides nothing, and the execution waits on.
    """
    by, words = order_words(data)
    if data.get("order") != "resolve":
        machine.remark("resumed", "", words | {"mail": mail.number}, now, actor=by)
        return
    verdict = {"verdict": data.get("verdict"), "value": data.get("value")}
    try:
        machine.tell("resolved", mail.path or "", words | verdict, now, actor=by)
    except (NotEncodable, TooLarge) as error:
        verdict = {"verdict": "unfit", "error": {"code": error.code, "detail": storable(str(error))}}
        machine.tell("resolved", mail.path or "", words | verdict, now, actor=by)


def tell_decision(machine: Machine, mail: Mail, data: dict[str, Json], now: datetime) -> None:
    """What a person decided about an approval. It is late when nobody waits for it, or not for that."""
    by, words = order_words(data)
    path, choice = mail.path or "", data.get("choice")
    found = machine.open.get(path) if mail.epoch == machine.epoch else None
    fits = found is not None and found[1].is_decision and choice in found[1].args["choices"]
    value = {"choice": choice if fits else storable(str(choice))[:SHOWN_CHARACTERS_MAX], **words}
    where = path if mail.epoch == machine.epoch else f"epoch:{mail.epoch}/{path}"
    machine.tell("ended" if fits else "late", where, {"outcome": "done", "value": value}, now, actor=by)


def tell_child(machine: Machine, mail: Mail, data: dict[str, Json], now: datetime) -> None:
    """How a child ended, or that it was not begun. An error that is too large to be kept is told without its data, and
    a result that makes the undo too large as `failed`.
    """
    kind, path = "ended", mail.path or ""
    if mail.epoch != machine.epoch:
        kind, path = "late", f"epoch:{mail.epoch}/{path}"
    actor = f"child:{data.get('execution')}"
    fact = {name: data[name] for name in ("outcome", "value", "error") if name in data}
    try:
        machine.tell(kind, path, fact, now, actor=actor)
    except (NotEncodable, TooLarge) as error:
        if fact.get("outcome") == "done":
            fact = Outcome("failed", code=error.code, detail=storable(str(error))).as_json()
        else:
            fact["error"] = {name: fact["error"].get(name) for name in ("status", "code", "detail")}
        machine.tell(kind, path, fact, now, actor=actor)


def order_words(data: dict[str, Json]) -> tuple[str, dict[str, Json]]:
    """Who gave an order, as an actor; and name and reason, as a fact keeps them."""
    words: dict[str, Json] = {key: storable(str(data.get(key) or "")) for key in ("by", "reason")}
    return f"operator:{words['by']}", words


def tell_outcome(
    machine: Machine, kind: str, path: str, data: dict[str, Json], at: datetime, *, actor: str
) -> None:
    """An outcome as mail carries it; one that cannot be stored is `failed`, and may have acted."""
    try:
        machine.tell(kind, path, outcome_in(data).as_json(), at, actor=actor)
    except (MalformedJson, NotEncodable, TooLarge) as error:
        unfit = Outcome("failed", code=error.code, detail=storable(str(error)))
        machine.tell(kind, path, unfit.as_json(), at, actor=actor)


def outcome_in(data: dict[str, Json]) -> Outcome:
    """Raises MalformedJson when `data` is no outcome that a message or a step can have."""
    outcome = Outcome.from_json(data)
    if outcome.kind not in MESSAGE_OUTCOMES:
        raise MalformedJson("outcome", "/outcome", f"{outcome.kind}, which is for waits")
    return outcome


def said(mail: Mail) -> dict[str, Json]:
    """What `mail` says; nothing when it is no JSON object."""
    try:
        return mail.read()
    except MalformedJson:
        return {}


def stopped_by(journal: Sequence[Fact]) -> Fact | None:
    """The `held` fact that a journal ends with when its program was stopped, and nobody has resumed it."""
    for fact in reversed(journal):
        if fact.kind == "resumed" or fact.kind not in BYSTANDERS:
            return None
        if fact.kind == "held" and fact.data.get("code") in STOPPING:
            return fact
    return None


def deaths_at_end(journal: Sequence[Fact]) -> int:
    """How many workers in a row died of an execution, with nothing written in between."""
    count = 0
    for fact in reversed(journal):
        if fact.kind != "orphaned":
            break
        count += 1
    return count


def noted_in(journal: Sequence[Fact]) -> set[int]:
    """Numbers of the orders that a journal has written down before their turn."""
    return {fact.data["mail"] for fact in journal if fact.kind == "ordered"}


def acted_in(journal: Sequence[Fact]) -> set[int]:
    """Numbers of the orders that a journal says were obeyed before their turn."""
    numbers: set[int] = set()
    for fact in journal:
        if fact.kind == "resumed" and fact.data.get("early"):
            numbers.add(fact.data["mail"])
        elif fact.kind == "held":
            numbers.update(fact.data.get("orders", ()))
    return numbers
