"""Journals of this release: scenarios that always come to the same facts, told by the engine's own inputs.

`python -m tests.golden.record` writes those of the release that is being made, once its payloads are as they are meant
to be. The files of releases that were made are never written again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from examples.shop.contracts import Order
from examples.shop.flows import order_saga
from orchestrator.cli.arguments import VERSION
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.upcast import SCHEMA
from orchestrator.engine import work
from orchestrator.engine.attempt import Done, Failure, Refusal
from orchestrator.engine.inputs import Inputs
from orchestrator.flows import Flow
from orchestrator.store.executions import Mail
from tests.golden.flows import asks, ends, guides, maps, months, people, races, turns, waits, writes

Json = Any
FOLDER: Final = Path(__file__).parent
CURRENT: Final = FOLDER / f"{VERSION}.json"
NOON: Final = datetime(2027, 1, 15, 12, tzinfo=UTC)
TRACE: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Recording:
    """One execution of a flow, in the hands of the engine's own inputs, by a clock that a scenario turns."""

    def __init__(
        self, flow: Flow, given: Json, *, key: str | None = None, deadline: timedelta | None = None
    ) -> None:
        self.flow = flow
        self.at = NOON
        self.facts: list[Fact] = []
        self._mail = 0
        self._inputs = Inputs()
        self._machine = Machine(flow.program)
        started = {
            "input": flow.checked(given),
            "definition": flow.name,
            "version": flow.version,
            "seed": "5eed5eed5eed5eed",
            "key": key,
            "traceparent": TRACE,
        } | ({} if deadline is None else {"deadline": (NOON + deadline).isoformat()})
        self._machine.tell("started", "", started, self.at, actor="program")
        self._keep()

    # ---- what comes by mail --------------------------------------------------------------------------------

    def replies(self, path: str, value: Json = None, *, epoch: int = 0) -> None:
        self._post("reply", path, {"outcome": "done", "value": value}, epoch=epoch)

    def refuses(self, path: str, code: str) -> None:
        error = {"code": code, "detail": "said no", "data": {"limit": 5}}
        self._post("reply", path, {"outcome": "refused", "error": error})

    def fails(self, path: str, code: str) -> None:
        self._post("reply", path, {"outcome": "failed", "error": {"code": code, "detail": "gave up"}})

    def settles(self, path: str, outcome: str, code: str) -> None:
        """What the relay says became of a message."""
        self._post("result", path, {"outcome": outcome, "code": code}, sender="waypost")

    def is_granted(self, path: str) -> None:
        """It is its turn to have the mutex that it asked for at `path`."""
        self._post(
            "result", path, {"outcome": "done", "value": None}, sender="waypost", source="waypost:mutex"
        )

    def receives(self, type_: str, key: str, data: Json, *, path: str) -> None:
        self._post("event", path, data, type_=type_, key=key)

    def orders(self, order: str, path: str | None = None, **more: Json) -> None:
        said = {"order": order, "by": "ann", "reason": "I looked", **more}
        self._post("order", path, said, sender="waypost", feed=False)

    def _post(
        self,
        kind: str,
        path: str | None,
        data: Json,
        *,
        sender: str = "hotel",
        type_: str | None = None,
        key: str | None = None,
        feed: bool = True,
        epoch: int = 0,
        source: str | None = None,
    ) -> None:
        self._mail += 1
        mail = Mail(
            number=self._mail, kind=kind, epoch=epoch, path=path, data=json.dumps(data), sender=sender,
            received_at=self.at, inbox_id=self._mail, type=type_, key=key,
            source=f"/{sender}" if type_ else source, event_id=f"e-{self._mail}" if type_ else None,
        )  # fmt: skip
        self._inputs.add([mail])
        if feed:
            self.reads()

    def reads(self) -> None:
        """The mail becomes facts."""
        self._inputs.feed(self._machine, self.at)
        self._keep()

    # ---- what the worker does ------------------------------------------------------------------------------

    def runs(self, path: str, value: Json = None, *, error: str | None = None) -> None:
        """A try of a local step ends."""
        result = Done(value) if error is None else Failure({"code": error, "detail": "it raised"})
        work.tell(self._machine, path, result, self)  # pyright: ignore[reportArgumentType]  # it asks for the time only
        self._keep()

    def refuses_local(self, path: str, code: str) -> None:
        """The function of a transaction refuses, and was rolled back."""
        work.tell(self._machine, path, Refusal({"code": code, "detail": "no"}), self)  # pyright: ignore[reportArgumentType]  # it asks for the time only
        self._keep()

    def now(self) -> datetime:
        return self.at

    def passes(self, span: timedelta) -> None:
        self.at += span
        self.reads()

    def is_held(self) -> None:
        """The worker writes down what a person is needed for, as it does at each commit."""
        held = self._machine.held
        assert held is not None, self._machine.open
        self._machine.remark("held", held.path, {"code": held.code, "reason": held.reason}, self.at)
        self._keep()

    def is_terminated(self, *stands: str) -> None:
        """A person ends it without its program, as `waypost.terminate` writes it down."""
        error = {"class": "permanent", "type": "Terminated", "code": "terminated", "detail": "by ann: enough"}
        said = {"kind": "failed", "by": "ann", "reason": "enough", "stands": [*stands], "error": error}
        self._machine.tell("terminated", "", said, self.at, actor="operator:ann")
        self._keep()

    def dies(self) -> None:
        """The worker dies, and the execution is taken over; the next owner replays."""
        by = "0197a5b0-0000-7000-8000-000000000001"
        position = self.facts[-1].position + 1
        self._take_up(Fact(position, "orphaned", "", {"by": by}, self.at, actor="worker"))

    def stops_and_resumes(self, code: str) -> None:
        """The program is stopped, and a person lets it go on."""
        position = self.facts[-1].position + 1
        held = Fact(position, "held", "", {"code": code, "reason": "a bug"}, self.at, actor="worker")
        said = {"by": "ann", "reason": "mended", "mail": self._mail + 1, "early": True}
        resumed = Fact(position + 1, "resumed", "", said, self.at, actor="operator:ann")
        self._mail += 1
        self._take_up(held, resumed)

    def _take_up(self, *facts: Fact) -> None:
        self.facts += facts
        self._machine.evict()
        self._machine = Machine(self.flow.program)
        self._machine.replay(self.facts, now=self.at)
        self._keep()

    def _keep(self) -> None:
        self.facts += self._machine.take_new()
        if self._machine.continues:
            self._machine.evict()
            self._machine = Machine(self.flow.program)
            self._machine.replay(self.facts, now=self.at)
            self._keep()

    @property
    def ended(self) -> str:
        """How it ended, or stands."""
        return str(self._machine.status)

    def over(self) -> list[dict[str, Json]]:
        """All its facts, as rows of the journal."""
        self._machine.evict()
        return [written(fact) for fact in self.facts]


def written(fact: Fact) -> dict[str, Json]:
    return {
        "position": fact.position,
        "kind": fact.kind,
        "path": fact.path,
        "schema": SCHEMA,
        "payload": json.loads(fact.text) if fact.text is not None else fact.data,
        "actor": fact.actor,
        "at": fact.at.isoformat(),
    }


# ---- scenarios -------------------------------------------------------------------------------------------------

ORDER: Final = Order(id="A-1042", customer="Ann", total=4200)
HOUR: Final = timedelta(hours=1)
SECOND: Final = timedelta(seconds=1)


def an_order_that_is_shipped() -> Recording:
    it = Recording(order_saga, ORDER, key="A-1042")
    it.replies("reserve", {"reservation": "r-1"})
    it.replies("charge", {"charge": "c-1"})
    it.replies("create", {"tracking": "t-1"})
    return it


def an_order_whose_card_is_declined() -> Recording:
    it = Recording(order_saga, ORDER)
    it.replies("reserve", {"reservation": "r-1"})
    it.refuses("charge", "declined")
    it.replies("reserve/undo")
    return it


def an_order_whose_charge_is_unknown() -> Recording:
    it = Recording(order_saga, ORDER)
    it.replies("reserve", {"reservation": "r-1"})
    it.passes(HOUR)
    it.settles("charge", "unknown", "sent")
    it.replies("charge", {"charge": "c-late"})
    it.replies("charge/undo")
    it.replies("reserve/undo")
    return it


def a_trip_that_waits_for_everything() -> Recording:
    it = Recording(waits, "Rome")
    it.replies("book", {"ref": "b-1"})
    it.runs("measure", error="raised")
    it.dies()
    it.passes(SECOND)
    it.runs("measure", 4)
    it.passes(timedelta(minutes=1))
    it.receives("trip.paid", "Rome", {"trip": "Rome", "amount": 3}, path="trip%2Epaid")
    it.passes(HOUR)
    return it


def a_race_whose_loser_was_under_way() -> Recording:
    it = Recording(races, "Oslo")
    it.replies("first.1/stay", {"ref": "b-1"})
    it.settles("first.0/rail", "refused", "never-sent")
    it.runs("extras/all.0/measure", 4)
    it.stops_and_resumes("program-fault")
    it.passes(SECOND)
    return it


def a_step_that_a_person_decides_and_an_undo_that_fails() -> Recording:
    it = Recording(asks, "Bern")
    it.replies("book", {"ref": "b-1"})
    it.passes(timedelta(minutes=1))
    it.settles("buy", "unknown", "sent")
    it.is_held()
    it.orders("resolve", "buy", verdict="done", value={"ref": "t-1"})
    it.reads()
    it.passes(HOUR)
    it.refuses("book/undo", "too-late")
    it.is_held()
    it.receives("trip.paid", "Bern", {"trip": "Bern", "amount": 3}, path="nowhere")
    it.orders("resolve", "book/undo", verdict="retry", value=None)
    it.reads()
    it.refuses("book/undo#2", "too-late")
    it.is_held()
    it.orders("resume")
    it.orders("resolve", "book/undo#2", verdict="skip", value=None)
    it.reads()
    return it


def a_trip_that_is_cancelled() -> Recording:
    it = Recording(ends, "Kiel")
    it.replies("book", {"ref": "b-1"})
    it.orders("cancel", undo=True)
    it.reads()
    it.runs("measure", 4)
    it.replies("book/undo")
    return it


def a_trip_that_is_not_over_in_its_time() -> Recording:
    it = Recording(ends, "Kiel", deadline=timedelta(minutes=30))
    it.replies("book", {"ref": "b-1"})
    it.passes(timedelta(minutes=30))
    it.runs("measure", 4)
    it.replies("book/undo")
    return it


def a_trip_that_is_terminated() -> Recording:
    it = Recording(ends, "Kiel")
    it.replies("book", {"ref": "b-1"})
    it.is_terminated("book")
    return it


def items_two_at_a_time() -> Recording:
    it = Recording(maps, ["Rome", "Oslo", "Bern"])
    it.runs("map.1/measure", 4)
    it.runs("map.0/measure", 4)
    it.runs("map.2/measure", 4)
    it.passes(HOUR)
    return it


def a_trip_that_a_person_approves_and_a_hotel_that_is_busy() -> Recording:
    it = Recording(people, "Rome")
    it.passes(timedelta(minutes=10))
    it.orders("decide", "trip/first.0/decision", choice="approve")
    it.reads()
    it.fails("book", "busy")
    it.passes(timedelta(minutes=1))
    it.replies("book", {"ref": "b-1"})
    return it


def a_flow_that_continues_as_new() -> Recording:
    it = Recording(months, 1, key="m-1")
    it.receives("trip.paid", "all", {"trip": "all", "amount": 3}, path="nowhere")
    it.replies("book", {"ref": "b-1"})
    it.replies("book", {"ref": "b-2"}, epoch=1)
    return it


def a_trip_that_is_written_down_and_undone() -> Recording:
    it = Recording(writes, "Rome")
    it.runs("enroll", 4)
    it.runs("again", error="raised")
    it.dies()
    it.refuses_local("again", "sold-out")
    it.dies()
    it.runs("once-more", 4)
    it.runs("enroll/undo")
    return it


def a_trip_that_waits_for_its_turn_and_an_undo_that_is_sent_again() -> Recording:
    it = Recording(turns, "Rome")
    it.is_granted("flow:mutex")
    it.is_granted("book/mutex")
    it.replies("book", {"ref": "b-1"})
    it.fails("book/undo", "busy")
    it.passes(timedelta(minutes=1))
    it.replies("book/undo")
    return it


def a_guide_that_is_printed_at_the_second_try_and_whose_child_is_undone() -> Recording:
    it = Recording(guides, "Oslo")
    it.is_granted("print/mutex")
    it.fails("print", "no-paper")
    it.passes(timedelta(minutes=1))
    it.replies("print", {"ref": "a-1"})
    it.replies("golden.months", 7)
    it.replies("golden.months/undo")
    it.replies("print/undo")
    return it


SCENARIOS: Final[dict[str, Callable[[], Recording]]] = {
    scenario.__name__: scenario
    for scenario in (
        an_order_that_is_shipped,
        an_order_whose_card_is_declined,
        an_order_whose_charge_is_unknown,
        a_trip_that_waits_for_everything,
        a_race_whose_loser_was_under_way,
        a_step_that_a_person_decides_and_an_undo_that_fails,
        a_trip_that_is_cancelled,
        items_two_at_a_time,
        a_trip_that_a_person_approves_and_a_hotel_that_is_busy,
        a_flow_that_continues_as_new,
        a_trip_that_is_not_over_in_its_time,
        a_trip_that_is_terminated,
        a_trip_that_is_written_down_and_undone,
        a_trip_that_waits_for_its_turn_and_an_undo_that_is_sent_again,
        a_guide_that_is_printed_at_the_second_try_and_whose_child_is_undone,
    )
}


def text_of(journals: dict[str, Json]) -> str:
    """A fact a line, so that people see what changed."""
    parts = [
        f'"{name}": {{"flow": "{it["flow"]}", "ended": "{it["ended"]}", "facts": [\n  '
        + ",\n  ".join(json.dumps(fact, ensure_ascii=False) for fact in it["facts"])
        + "\n]}"
        for name, it in journals.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def recorded() -> dict[str, Json]:
    """The journals of all scenarios, as this code makes them."""
    journals: dict[str, Json] = {}
    for name, scenario in SCENARIOS.items():
        it = scenario()
        journals[name] = {"flow": it.flow.name, "ended": it.ended, "facts": it.over()}
    return journals


if __name__ == "__main__":
    CURRENT.write_text(text_of(recorded()), encoding="utf-8")
