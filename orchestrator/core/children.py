"""What an author says about another flow that is run: as a child, or on its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable
from uuid import UUID

from pydantic import TypeAdapter

from contracts.errors import InputInvalid, shown
from contracts.identifiers import child_id, keyed_id
from contracts.limits import CHILD_DEPTH_MAX, CHILDREN_MAX, KEY_BYTES_MAX
from contracts.messages import marks, plain
from contracts.sensitive import places_of
from orchestrator.core.ask import Ask, since
from orchestrator.core.errors import UsageError
from orchestrator.core.names import is_name, named
from orchestrator.core.terms import Undo, undoing

Json = Any
I = TypeVar("I", contravariant=True)  # noqa: E741, PLC0105  # what a flow is given
O = TypeVar("O", covariant=True)  # noqa: E741, PLC0105  # what it returns
R = TypeVar("R")


@runtime_checkable
class Flow(Protocol[I, O]):
    """What must be known of a flow that another one runs."""

    @property
    def name(self) -> str: ...
    @property
    def run(self) -> Callable[[Any, I], Coroutine[Any, Any, O]]: ...
    @property
    def input(self) -> TypeAdapter[Any]: ...
    @property
    def output(self) -> TypeAdapter[Any]: ...
    @property
    def mutex(self) -> Callable[[Any], str] | None: ...
    def checked(self, input: Json) -> Json: ...  # noqa: A002  # an execution's input, everywhere


@dataclass(frozen=True, slots=True)
class Handle(Generic[R]):
    """An execution that `start` began: its id, its flow, and its key.

    With a key it is the same handle wherever a flow starts that key. When somebody else had begun an execution with the
    key, that one is meant, under an id of its own: it is found by its key.
    """

    execution_id: UUID
    flow: str
    key: str | None = None


TOO_DEEP: Final = "too-deep"
TOO_MANY: Final = "too-many"
MUTEX_INSIDE: Final = "mutex-inside"
INSIDE: Final = "a flow with mutex= as a child of one that has a mutex already, or of a child of such a one"


def asked_of(
    what: str,
    flow: Flow[Any, Any],
    input: object,  # noqa: A002  # an execution's input, everywhere
    key: str | None,
) -> dict[str, Json]:
    """What is asked, as facts have it. Raises UsageError for what is no flow, an input that it does not take, and a
    key that cannot be one.
    """
    if not isinstance(flow, Flow):  # pyright: ignore[reportUnnecessaryIsInstance]  # authors need not use types
        raise UsageError(f"{what}: expected a flow, made by @workflow, found {shown(flow)}")
    if key is not None and not is_name(key, KEY_BYTES_MAX):
        raise UsageError(
            f"{what} {flow.name}: key {shown(key)}: expected 1 to {KEY_BYTES_MAX} bytes of printable text"
        )
    try:
        data = flow.checked(plain(input))
    except InputInvalid as error:
        raise UsageError(f"{what} {flow.name}: {error}") from None
    sensitive = marks(data=places_of(flow.input), value=places_of(flow.output))
    return {"flow": flow.name, "data": data, "key": key} | sensitive


def child_of(
    flow: Flow[Any, Any],
    input: object,  # noqa: A002  # an execution's input, everywhere
    key: str | None,
    *,
    undo: Undo[Any] | None,
    timeout: timedelta | None,
    name: str | None,
) -> Ask:
    """The ask of a child. Raises UsageError."""
    args = asked_of("ctx.child", flow, input, key)
    ask = Ask(
        "child",
        named(name or flow.name),
        args,
        undo=undoing(undo, flow.output),
        timeout=since(timeout),
    )
    ask.exclusive = flow.mutex is not None
    return ask


def id_of(execution: str, epoch: int, path: str, *, flow: str, key: str | None) -> UUID:
    """The id of what `start` begins at `path`: with a key, the same wherever that is started."""
    return child_id(execution, epoch, path) if key is None else keyed_id(flow, key)


def refusal(depth: int, open_children: int, *, exclusive: bool, under_mutex: bool) -> dict[str, Json] | None:
    """Why an execution that is `depth` children deep, with so many open, may not have one more; None: it may.

    An `exclusive` one would wait for a mutex `under_mutex`, which its parent or one before that has, and keeps until
    the child has ended: two such families could wait for each other for ever.
    """
    if exclusive and under_mutex:
        return {"code": MUTEX_INSIDE, "detail": INSIDE}
    if depth >= CHILD_DEPTH_MAX:
        return {"code": TOO_DEEP, "detail": f"child_depth_max: {CHILD_DEPTH_MAX} children inside each other"}
    if open_children >= CHILDREN_MAX:
        return {"code": TOO_MANY, "detail": f"children_max: {CHILDREN_MAX} children of one execution at once"}
    return None
