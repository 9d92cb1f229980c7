"""The functions that act on commands, and how what they return or raise becomes a reply."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pydantic import ValidationError

from contracts import strict_json
from contracts.dataref import DataWrong, is_named
from contracts.envelope import ABSENT, Envelope
from contracts.errors import MalformedEvent, shown
from contracts.limits import PROBLEMS_MAX
from contracts.log import told
from contracts.messages import Command, Refused
from contracts.sensitive import REDACTED, Places, faults_of, places_of, scrubbed, values_at
from receiver import replies
from receiver.replies import Reply

R = TypeVar("R")
P = ParamSpec("P")


class Failed(Exception):
    """What a handler raises to give up on something that may have been done; it is not tried again."""

    def __init__(self, code: str, message: str = "", *, detail: Any = None) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a handler may know beside its command."""

    event: Envelope
    key: str
    """Of the business action. Give it as the idempotency key to whatever you call."""
    attempt: int
    """Of sending this message, from 1."""
    again: bool
    """An earlier run had no answer, so it may have acted."""
    undoes: str | None
    """On an undo: the id of the command to undo."""
    known: bool
    """On an undo: whether it is known that the command was done."""
    expires_at: datetime | None
    """After it nobody waits for the reply."""

    @property
    def message(self) -> str:
        """The command's id, the same for each attempt."""
        return self.event.id

    @classmethod
    def of(cls, event: Envelope, headers: Mapping[str, str]) -> Delivery:
        """Raises MalformedEvent when the event is no command as the wire describes it."""
        key, undoes, expires = (event.extensions.get(it) for it in ("idempotencykey", "undoes", "expirytime"))
        problems: list[str] = []
        if event.id != headers.get("webhook-id"):
            problems.append("id: expected to equal webhook-id")
        expires_at = None if expires is None else moment_of(expires)
        if expires is not None and expires_at is None:
            problems.append("expirytime: expected an RFC 3339 timestamp")
        if not isinstance(key, str) or not key or not isinstance(undoes, str | None) or undoes == "":
            problems.append("idempotencykey, undoes: expected strings that are not empty")
            raise MalformedEvent(problems)
        if problems:
            raise MalformedEvent(problems)
        attempt = headers.get("waypost-attempt", "")
        return cls(
            event=event,
            key=key,
            attempt=int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) < 7 else 1,
            again=False,
            undoes=undoes,
            known=event.extensions.get("known") is True,
            expires_at=expires_at,
        )


class NotBegun(Exception):
    """A command that no handler is called for."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code = code
        self.message = message


Fetch = Callable[[Envelope], Awaitable[Envelope]]
"""An event with the data that it names. Raises DataAway, DataWrong."""


class Raised(Exception):
    """A handler raised what is no Exception: SystemExit, CancelledError, StopIteration in a thread and the like."""


class Registration(Generic[R]):
    """Takes the handler of one command; its result must be what the command promises."""

    def __init__(self, add: Callable[[Callable[..., Any]], None]) -> None:
        self._add = add

    @overload
    def __call__(
        self, handler: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, handler: Callable[P, R], /) -> Callable[P, R]: ...
    def __call__(self, handler: Callable[P, Any], /) -> Callable[P, Any]:
        self._add(handler)
        return handler


@dataclass(frozen=True, slots=True)
class Handler:
    kind: type[Command[Any]]
    function: Callable[..., Any]
    wants_delivery: bool

    @classmethod
    def of(cls, kind: type[Command[Any]], function: Callable[..., Any]) -> Handler:
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = [it for it in inspect.signature(function).parameters.values() if it.kind in places]
        return cls(kind, function, wants_delivery=len(taken) > 1)

    async def act(
        self,
        delivery: Delivery,
        *,
        source: str,
        threads: Executor,
        fetch: Fetch,
    ) -> Reply:
        """Run the handler, once, and tell what it said. Whatever else it raises passes through. `fetch` gets the data
        that the command names; DataAway, which it raises, passes through.
        """
        command = delivery.event
        try:
            delivery, request = await self._asked(delivery, fetch)
        except NotBegun as no:
            not_begun = replies.failed if delivery.again else replies.refused
            return not_begun(command, source=source, code=no.code, message=no.message)
        try:
            result = await self._call(request, delivery, threads)
        except Refused as no:
            return replies.refused(command, source=source, code=no.code, message=no.message, detail=no.detail)
        except Failed as no:
            return replies.failed(command, source=source, code=no.code, message=no.message, detail=no.detail)
        try:
            value = self._write(result)
        except (ValidationError, ValueError) as error:
            message = (
                problems(error, places_of(self.kind.reply_))
                if isinstance(error, ValidationError)
                else str(error)
            )
            return replies.failed(command, source=source, code="reply-invalid", message=message)
        return replies.done(command, source=source, value=value)

    async def _asked(self, delivery: Delivery, fetch: Fetch) -> tuple[Delivery, Command[Any]]:
        """The delivery with all of its data, and the command that they are. Raises NotBegun, DataAway."""
        if delivery.expires_at is not None and datetime.now(UTC) >= delivery.expires_at:
            raise NotBegun("expired", "nobody waits for this any more")
        try:
            if not is_named(delivery.event):
                return delivery, self._read(delivery.event)
            event = await fetch(delivery.event)
            return replace(delivery, event=event), await asyncio.to_thread(self._read, event)
        except DataWrong as error:
            raise NotBegun(error.code, str(error)) from None
        except ValidationError as error:
            raise NotBegun("invalid", problems(error, places_of(self.kind))) from None

    async def _call(self, request: Command[Any], delivery: Delivery, threads: Executor) -> Any:
        arguments = (request, delivery) if self.wants_delivery else (request,)
        if inspect.iscoroutinefunction(self.function):
            return await unharmed(self.function(*arguments))
        context = contextvars.copy_context()

        def call() -> tuple[Any, BaseException | None]:
            return context.run(carried, self.function, *arguments)

        result, error = await asyncio.get_running_loop().run_in_executor(threads, call)
        if error is not None:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            raise error if plain else Raised(repr(error))
        return await unharmed(result) if inspect.isawaitable(result) else result

    def _read(self, command: Envelope) -> Command[Any]:
        if command.data is ABSENT:
            return self.kind.model_validate_json("{}")
        if isinstance(command.data, bytes):
            return self.kind.model_validate_json(command.data)
        return self.kind.model_validate_json(strict_json.encode(command.data, what="data"))

    def told(self, error: Exception, delivery: Delivery) -> Exception | str:
        """`error` for a log: without the values of this command that are sensitive."""
        data = delivery.event.data
        places = places_of(self.kind)
        if not (places or places_of(self.kind.reply_)):
            return error
        unknown = isinstance(data, bytes) or is_named(delivery.event)
        return REDACTED if unknown else scrubbed(told(error), values_at(data, places))

    def _write(self, result: Any) -> Any:
        return self.kind.reply_.dump_python(self.kind.reply_.validate_python(result), mode="json")


def carried(function: Callable[..., Any], *arguments: object) -> tuple[Any, BaseException | None]:
    """What it returned or raised, as a value: a future takes no StopIteration, and a CancelledError for its own."""
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001  # a handler may not end its service
        return None, error


async def unharmed(work: Awaitable[Any]) -> Any:
    """Await `work`; what it raises that is no Exception becomes one, but for a cancellation of ourselves."""
    try:
        return await work
    except Exception:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Raised(repr(error)) from error
    except BaseException as error:
        raise Raised(repr(error)) from error


def problems(error: ValidationError, places: Places) -> str:
    """Where and what, without the values that were found there: they belong to somebody else."""
    found = islice(faults_of(error, places), PROBLEMS_MAX)
    return shown_lines([f"{'/'.join(map(str, where)) or 'the whole'}: {said}" for where, said in found])


def shown_lines(lines: list[str]) -> str:
    return "; ".join(shown(line)[1:-1] for line in lines)


def moment_of(text: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(text).upper())
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
