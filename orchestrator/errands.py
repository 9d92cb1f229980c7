"""What an application asks of Waypost in a transaction of its own: it happens with that transaction, or not at all.

    with conn.transaction():
        conn.execute("insert into orders …")
        errands.start(conn, order_saga, order, key=order.id)

Each function takes a connection of psycopg, `Connection` or `AsyncConnection`; with the second it is awaited. The
transaction is the caller's, READ COMMITTED. What is asked for is done when it commits: until then no lock is held, and
an id that was told stands for nothing. What may still fail at the commit does so because another transaction was faster
(see `start`). In autocommit each call is a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Final, LiteralString, TypeVar, overload
from uuid import UUID

import psycopg

from contracts import strict_json
from contracts.errors import Conflict, ContractViolation, KeyConflict, UnknownFlow, shown
from contracts.limits import IDENTITY_BYTES_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX
from contracts.messages import Event
from orchestrator.core.names import is_name
from orchestrator.store import errands as store
from orchestrator.store.errands import AsyncConnection, Connection, Parameters
from orchestrator.workflow import Workflow

I = TypeVar("I")  # noqa: E741  # what a flow is given

SOURCE: Final = "/application"
"""The `source` of published events, unless another is given."""


class ErrandInvalid(ContractViolation):
    """What is asked for lacks something, or says something that cannot be; nothing was written."""

    code = "errand-invalid"


class IdTaken(Conflict):
    """The id of an event stands for another one."""

    code = "id-taken"


@overload
def start(
    conn: Connection,
    flow: Workflow[I, Any],
    input: I,  # an execution's input, everywhere
    *,
    key: str | None = None,
    traceparent: str | None = None,
) -> UUID: ...
@overload
def start(
    conn: AsyncConnection,
    flow: Workflow[I, Any],
    input: I,  # an execution's input, everywhere
    *,
    key: str | None = None,
    traceparent: str | None = None,
) -> Coroutine[Any, Any, UUID]: ...
def start(
    conn: Connection | AsyncConnection,
    flow: Workflow[I, Any],
    input: I,  # noqa: A002  # an execution's input, everywhere
    *,
    key: str | None = None,
    traceparent: str | None = None,
) -> Any:
    """Start a flow, in its version, and tell the execution's id. A second start with the same `key` and input tells the
    first one's. With a `traceparent`, the execution goes on in that trace.

    Raises InputInvalid with every place that does not fit, NotEncodable, TooLarge or ErrandInvalid before anything is
    sent to the database; UnknownFlow when no worker has made this version known; KeyConflict when the key belongs to an
    execution with another input. The commit raises psycopg's SerializationFailure when another transaction has started
    the key meanwhile (repeat yours, and it finds that execution), or an error with the code WP409 when it did so with
    another input.
    """
    checked_name("key", key, KEY_BYTES_MAX)
    checked = flow.checked(input)
    parameters: Parameters = {
        "flow": flow.name,
        "input": strict_json.encode(checked, what=f"input of flow {flow.name}", bytes_max=PAYLOAD_BYTES_MAX),
        "key": key,
        "version": flow.version,
        "traceparent": traceparent,
    }
    return errand(conn, store.START, parameters)


@overload
def signal(
    conn: Connection,
    event: Event,
    *,
    key: str | None = None,
    id: str | None = None,
    traceparent: str | None = None,
) -> str: ...
@overload
def signal(
    conn: AsyncConnection,
    event: Event,
    *,
    key: str | None = None,
    id: str | None = None,
    traceparent: str | None = None,
) -> Coroutine[Any, Any, str]: ...
def signal(
    conn: Connection | AsyncConnection,
    event: Event,
    *,
    key: str | None = None,
    id: str | None = None,  # noqa: A002
    traceparent: str | None = None,
) -> Any:
    """Give an event to the flows that wait for its type and key, and start those that it starts; tell its id.

    The key is that of the event's class unless one is given. Of events with one `id` the first counts. Raises
    NotEncodable, TooLarge or ErrandInvalid before anything is sent to the database; the commit raises an error with the
    code WP409 when the id stands for another event.
    """
    return errand(conn, store.SIGNAL, parameters_of(event, key, id, traceparent))


@overload
def publish(
    conn: Connection,
    event: Event,
    *,
    key: str | None = None,
    source: str = SOURCE,
    id: str | None = None,
    traceparent: str | None = None,
) -> str: ...
@overload
def publish(
    conn: AsyncConnection,
    event: Event,
    *,
    key: str | None = None,
    source: str = SOURCE,
    id: str | None = None,
    traceparent: str | None = None,
) -> Coroutine[Any, Any, str]: ...
def publish(
    conn: Connection | AsyncConnection,
    event: Event,
    *,
    key: str | None = None,
    source: str = SOURCE,
    id: str | None = None,  # noqa: A002
    traceparent: str | None = None,
) -> Any:
    """Send an event to the endpoints that subscribe to its type, and give it to flows after the commit; tell its id.
    The key is its subject.

    `source` says who speaks, as a URI reference. Of events of one source with one `id` the first counts. Raises as
    `signal` does.
    """
    parameters = parameters_of(event, key, id, traceparent) | {"source": source}
    return errand(conn, store.PUBLISH, parameters)


def parameters_of(event: Event, key: str | None, id: str | None, traceparent: str | None) -> Parameters:  # noqa: A002
    kind = type(event)
    if not is_name(kind.type_, IDENTITY_BYTES_MAX):
        raise ErrandInvalid(f"event {kind.__name__}: expected a class with type=, found {shown(kind.type_)}")
    if key is None and kind.key_ is not None:
        key = str(getattr(event, kind.key_))
    checked_name("key", key, KEY_BYTES_MAX)
    checked_name("id", id, IDENTITY_BYTES_MAX)
    data = event.model_dump(mode="json", by_alias=True)
    return {
        "type": kind.type_,
        "key": key,
        "data": strict_json.encode(data, what=f"event {kind.type_}", bytes_max=PAYLOAD_BYTES_MAX),
        "id": id,
        "traceparent": traceparent,
    }


def checked_name(what: str, name: str | None, bytes_max: int) -> None:
    if name is not None and not is_name(name, bytes_max):
        raise ErrandInvalid(f"{what} {shown(name)}: expected 1 to {bytes_max} bytes of printable text")


# ---- the database's answer -------------------------------------------------------------------------------------


def errand(conn: Connection | AsyncConnection, statement: LiteralString, parameters: Parameters) -> Any:
    """What the database says to an errand; its errors become ours."""
    if isinstance(conn, psycopg.AsyncConnection):
        return errand_later(conn, statement, parameters)
    with ours(parameters):
        return store.give(conn, statement, parameters)


async def errand_later(conn: AsyncConnection, statement: LiteralString, parameters: Parameters) -> Any:
    with ours(parameters):
        return await store.give_later(conn, statement, parameters)


@contextmanager
def ours(parameters: Parameters) -> Generator[None]:
    """Errors with our codes are raised as the classes that callers in Python know."""
    try:
        yield
    except psycopg.Error as error:
        said = error.diag
        flow, detail = parameters.get("flow"), said.message_detail or ""
        match said.sqlstate:
            case "WP404":
                known = detail.split(", ") if detail else []
                raise UnknownFlow(f"{flow}@{parameters.get('version')}", known) from None
            case "WP409" if flow is not None:
                raise KeyConflict(flow, parameters.get("key") or "", UUID(detail)) from None
            case "WP409":
                raise IdTaken(said.message_primary or "") from None
            case "WP400" | "WP413":
                raise ErrandInvalid(said.message_primary or "") from None
            case _:
                raise
