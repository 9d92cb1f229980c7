"""A flow under test: no database, no event loop, no clock.

It is fed outcomes and shows what it asks for. Every feeding is also replayed from the start and compared, so
every test of a flow is a test of its determinism.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, TypeVar, cast, overload

from contracts.messages import Command, Event, plain
from orchestrator.core.ask import Ask
from orchestrator.core.attributes import Value, value_of
from orchestrator.core.errors import code_of, in_words
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import FLOW
from orchestrator.core.status import TERMINAL
from orchestrator.core.terms import address
from orchestrator.workflow import Workflow

Json = Any
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")

EXECUTION: Final = "00000000-0000-8000-8000-000000000000"
NOON = datetime(2027, 1, 15, 12, tzinfo=UTC)


BAD_ENDS: Final = ("failed", "compensated", "cancelled", "terminated")
"""How a child may end otherwise than well."""


@dataclass(frozen=True, slots=True)
class Expected(Generic[R]):
    """One thing that the flow waits for, and what may become of it."""

    test: FlowTester[Any, Any]
    ask: Ask

    @property
    def path(self) -> str:
        return self.ask.path

    @property
    def data(self) -> Json:
        """The request, as it would be sent."""
        return self.ask.args["data"]

    def replies(self, value: R | None = None) -> None:
        """It was done, and this is the reply."""
        self.test.tell("ended", self.path, {"outcome": "done", "value": plain(value)})

    def refuses(self, code: str, detail: str = "", *, data: Json = None) -> None:
        """Definitely not done."""
        error = {"code": code, "detail": detail, **({"data": data} if data is not None else {})}
        self.test.tell("ended", self.path, {"outcome": "refused", "error": error})

    def fails(self, code: str = "failed", detail: str = "") -> None:
        """It gave up, and may have acted."""
        self._may_be_unknown()
        self.test.tell("ended", self.path, {"outcome": "failed", "error": {"code": code, "detail": detail}})

    def is_unknown(self, code: str = "no-answer") -> None:
        """Nobody knows."""
        self._may_be_unknown()
        self.test.tell("ended", self.path, {"outcome": "unknown", "error": {"code": code}})

    def ends(self, status: str = "failed", code: str = "", detail: str = "") -> None:
        """A child ended otherwise than well: failed, compensated, cancelled or terminated."""
        assert self.ask.is_child, f"{self.path}: only a child ends"
        assert status in BAD_ENDS, f"{status!r}: expected one of {', '.join(BAD_ENDS)}"
        error = {"status": status, "code": code or status, "detail": detail}
        self.test.tell("ended", self.path, {"outcome": "child_failed", "error": error})

    @property
    def is_told_to_end(self) -> bool:
        """Whether it is a child that nobody needs any more, and that is waited for until it has ended."""
        return self.ask.stopped is not None

    def raises(self, error: str | BaseException = "raised", detail: str = "") -> None:
        """One try of a local step raised an error, of this code or as it is; its retry policy decides."""
        if isinstance(error, str):
            self.test.attempt_failed(self.path, {"code": error, "detail": detail})
        else:
            said = {"code": code_of(error), "detail": in_words(error)}
            self.test.attempt_failed(self.path, said, raised=error)

    def runs_out(self, code: str = "attempt-timeout", *, left: Json = None) -> None:
        """One try of a local step was ended, and nobody knows what it did; its retry policy decides. `left` is what
        it had left for the next one.
        """
        self._may_be_unknown()
        self.test.attempt_failed(self.path, {"code": code, "detail": ""}, unknown=True, left=plain(left))

    def _may_be_unknown(self) -> None:
        assert not self.ask.is_exact, f"{self.path}: a transaction is done or refused, nothing else"
        assert not self.ask.is_child, f"{self.path}: a child replies, refuses or ends, nothing else"


class FlowTester(Generic[I, O]):
    """Drives one execution of a flow by hand, from `at` on; it may take no longer than `deadline`, or its flow's.

    It gets every mutex at once, but for the keys in `taken`, which others have until the test `frees` them.
    """

    def __init__(
        self,
        flow: Workflow[I, O],
        input: I,  # noqa: A002  # an execution's input, everywhere
        *,
        at: datetime = NOON,
        seed: str = "test",
        deadline: timedelta | None = None,
        taken: Iterable[str] = (),
    ) -> None:
        self.flow = flow
        self.taken = set(taken)
        self.at = at
        self.journal: list[Fact] = []
        self.machine = Machine(flow.program, execution=EXECUTION)
        span = deadline or flow.deadline
        until: dict[str, Json] = {} if span is None else {"deadline": (at + span).isoformat()}
        self.tell("started", "", {"input": flow.checked(plain(input)), "seed": seed} | until)

    @overload
    def expect(self, what: type[Command[R]] | Command[R]) -> Expected[R]: ...
    @overload
    def expect(self, what: Callable[..., Coroutine[Any, Any, R]]) -> Expected[R]: ...
    @overload
    def expect(self, what: Workflow[Any, R]) -> Expected[R]: ...
    @overload
    def expect(self, what: Callable[..., R]) -> Expected[R]: ...
    def expect(self, what: object) -> Expected[Any]:
        """The one thing that is open for a command (its class, or its exact value), a local function or a child's flow.

        Raises AssertionError that names what is open instead.
        """
        found = [ask for _, ask in self.machine.open.values() if _is(what, ask)]
        assert len(found) == 1, f"expected one {_named(what)}, open are {sorted(self.machine.open) or 'none'}"
        return Expected(self, found[0])

    def passes(self, span: timedelta) -> None:
        """Time passes; what falls due on the way happens in its order."""
        end = self.at + span
        while (due := self.machine.next_due()) is not None and due[0] <= end:
            self.at = max(self.at, due[0])
            self.machine.fire(self.at)
            self._keep()
        self.at = end

    def late(self, path: str, outcome: str, value: Json = None) -> None:
        """An answer for something that is over; of a child, `done` or `child_failed`."""
        said: dict[str, Json] = {"value": plain(value)} if outcome == "done" else {"error": value or {}}
        self.tell("ended", path, {"outcome": outcome, **said})

    def receives(self, event: Event | str, *, key: str | None = None, data: Json = None) -> None:
        """An event comes: an instance of its class (its key from the class's key field, unless given), or a type
        with data.
        """
        if isinstance(event, str):
            said: dict[str, Json] = {"type": event, "key": key or "", "data": plain(data)}
        else:
            field = type(event).key_
            found = key if key is not None else "" if field is None else str(getattr(event, field))
            said = {"type": type(event).type_, "key": found, "data": plain(event)}
        self.tell("received", "", said | {"source": "/tester", "id": str(len(self.journal))})

    def decides(self, subject: str, choice: str, by: str = "tester", *, reason: str = "") -> None:
        """A person decides about the approval of `subject` that is open.

        Raises AssertionError that names what waits for a decision instead, or which choices there are.
        """
        asked = {ask.args["subject"]: ask for _, ask in self.machine.open.values() if ask.is_decision}
        assert subject in asked, f"expected an approval of {subject!r}, open are {sorted(asked) or 'none'}"
        ask = asked[subject]
        assert choice in ask.args["choices"], (
            f"{subject}: expected one of {ask.args['choices']}, not {choice!r}"
        )
        value = {"choice": choice, "by": by, "reason": reason}
        self.tell("ended", ask.path, {"outcome": "done", "value": value})

    def frees(self, key: str) -> None:
        """Others are done with the mutex `key`: it is this flow's turn. Raises AssertionError when it was not taken."""
        assert key in self.taken, f"expected one of {sorted(self.taken) or 'none that is taken'}, not {key!r}"
        self.taken.remove(key)
        self._keep()

    def cancels(self, *, by: str = "tester", reason: str = "", undo: bool = True) -> None:
        """An operator cancels the execution; without `undo`, what was done stands."""
        self.tell("cancel_asked", "", {"by": by, "reason": reason, "undo": undo})

    def resolves(
        self, path: str, verdict: str, *, by: str = "tester", reason: str = "", value: Json = None
    ) -> None:
        """A person decides about what is held: retry, done, skip or not_done."""
        self.tell("resolved", path, {"verdict": verdict, "by": by, "reason": reason, "value": plain(value)})

    def tell(self, kind: str, path: str, data: dict[str, Json]) -> None:
        """One input fact, as the engine would tell it; then what was withdrawn settles, and all is replayed."""
        self.machine.tell(kind, path, data, self.at)
        self._keep()

    def attempt_failed(
        self,
        path: str,
        error: dict[str, Json],
        *,
        raised: BaseException | None = None,
        unknown: bool = False,
        left: Json = None,
    ) -> None:
        self.machine.attempt_failed(path, error, self.at, raised=raised, unknown=unknown, left=left)
        self._keep()

    @property
    def status(self) -> str:
        """`open`, `held`, or how it ended."""
        return "held" if self.machine.held is not None else str(self.machine.status)

    @property
    def open(self) -> list[str]:
        """The paths that the flow waits at."""
        return list(self.machine.open)

    @property
    def told(self) -> list[str]:
        """The paths at which it asked, in order."""
        return [fact.path for fact in self.journal if fact.kind == "asked"]

    @property
    def begun(self) -> list[tuple[str, Json, str | None]]:
        """Flow, input and key of each execution that it started, in order."""
        notes = [fact.data for fact in self.journal if fact.kind == "noted"]
        args = [note["args"] for note in notes if note["kind"] == "start"]
        return [(one["flow"], one["data"], one["key"]) for one in args]

    @property
    def returned(self) -> O:
        """What the flow returned. Raises AssertionError while it is under way, or when it failed."""
        last = self.journal[-1]
        assert last.data.get("kind") == "completed", f"not completed: {last}"
        return self.flow.output.validate_python(last.data["output"])

    @property
    def error(self) -> dict[str, Json]:
        """The failure that ended the flow, as data."""
        return self.journal[-1].data["error"]

    @property
    def attributes(self) -> dict[str, Value]:
        """What the flow has published about its execution, and not removed."""
        return {name: value_of(data) for name, data in self.machine.attributes.items()}

    def _timed(self, machine: Machine) -> list[str]:
        return [path for path, (_, ask) in machine.open.items() if ask.retry_at is None]

    def _free_turn(self) -> str | None:
        """Where the flow waits for a mutex that nobody has, nor this flow itself."""
        held = self.machine.mutexes.held
        taken = {*self.taken, *(key for path, key in held.items() if path != FLOW)}
        turns = (ask for _, ask in self.machine.open.values() if ask.kind == "mutex")
        return next((ask.path for ask in turns if ask.args["key"] not in taken), None)

    def _keep(self) -> None:
        children = {fact.path for fact in self.journal if fact.data.get("kind") == "child"}
        for back in self.machine.settling():
            if back in children:  # it ends when the test says so
                continue
            self.machine.tell("ended", back, {"outcome": "unknown", "error": {"code": "sent"}}, self.at)
        while (turn := self._free_turn()) is not None:
            self.machine.tell("ended", turn, {"outcome": "done", "value": None}, self.at)
        self.journal += self.machine.take_new()
        again = Machine(self.flow.program, execution=EXECUTION)
        again.replay(self.journal)
        while (
            (due := again.next_due()) is not None and due[0] <= self.at and due[1] not in self._timed(again)
        ):
            again.fire(self.at)  # a time to try again leaves no fact
        if self.machine.continues:
            self.machine.evict()
            self.machine = again
            self._keep()
            return
        mine, his = _state(self.machine), _state(again)
        again.evict()
        assert mine == his, f"replay differs: {mine} live, {his} replayed"
        if self.machine.status in TERMINAL:
            assert not self.machine.open, f"finished with {list(self.machine.open)} open"


def _state(machine: Machine) -> tuple[object, ...]:
    held = None if machine.held is None else (machine.held.code, machine.held.path)
    due = machine.next_due()
    return machine.status, list(machine.open), machine.position, held, machine.new, due, machine.attributes


def _is(what: object, ask: Ask) -> bool:
    if not isinstance(ask.args, dict):
        return False
    action = {name: said for name, said in cast("dict[str, Json]", ask.args).items() if name != "bounds"}
    if isinstance(what, Workflow):
        return ask.is_child and action["flow"] == cast("Workflow[Any, Any]", what).name
    if isinstance(what, Command):
        wanted = cast("Command[Any]", what)
        return action.get("name") == wanted.type_ and action.get("data") == wanted.model_dump(mode="json")
    if isinstance(what, type) and issubclass(what, Command):
        return action.get("name") == cast("type[Command[Any]]", what).type_
    return action.get("name") == address(cast("Callable[..., Any]", what))


def _named(what: object) -> str:
    return getattr(what, "__name__", None) or getattr(what, "name", None) or repr(what)
