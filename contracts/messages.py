"""Contracts are classes: what a flow sends and what a service does is one pydantic model, imported by both.

    class Charged(BaseModel):
        charge: str

    class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
        order: str
        amount: int

The fields are the request, the parameter is the reply, the keywords say who acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Generic, Protocol, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter
from pydantic_core import PydanticSerializationError, to_jsonable_python

from contracts.sensitive import Places, places_of

R = TypeVar("R")
Json = Any


class Effect(StrEnum):
    """What is true when something was asked for and no answer came."""

    KEYED = "keyed"
    """Asking again under the same idempotency key is harmless. The default."""
    IDEMPOTENT = "idempotent"
    """Asking again is harmless, with or without a key."""
    AT_MOST_ONCE = "at_most_once"
    """Never ask again: the outcome stays unknown until somebody knows it."""


class Refused(Exception):  # it is said by handlers as a word: raise Refused("declined")
    """What a service or a local step raises to say "definitely not done": nothing is left to undo."""

    def __init__(self, code: str, message: str = "", *, detail: Json = None) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.detail = detail


class Action(Protocol):
    """Something that can be asked for later, as data: a command, or a local function with its arguments."""

    def as_action(self) -> dict[str, Json]:
        """`{"do": "call", "endpoint", "name", "data"}` or `{"do": "step", "name", "data"}`; with what `marks` says."""
        ...


def marks(**places: Places) -> dict[str, Json]:
    """`{"sensitive": {"data": […], "value": […]}}`, as facts say it beside what is asked: where in it, and in its
    result, nobody may look. Nothing at all where nothing is sensitive.
    """
    found = {what: list(where) for what, where in places.items() if where}
    return {"sensitive": found} if found else {}


NOTHING: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[None, BeforeValidator(lambda _: None)])
"""The reply of a command that has none: whatever the service says is passed over, as are added fields."""


class Command(BaseModel, Generic[R]):
    """A message that asks a service to act; `R` is the type of its reply (None when it has none).

    Requests refuse unknown fields. Replies are read by `R`, which by pydantic's default ignores them, so a
    service may add some. One with a `type` alone is work for a queue: nobody can call it. Raises TypeError when a class
    names an `endpoint` without a `type`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint_: ClassVar[str] = ""
    type_: ClassVar[str] = ""
    effect_: ClassVar[Effect] = Effect.KEYED
    reply_: ClassVar[TypeAdapter[Any]] = TypeAdapter(Any)

    def __init_subclass__(
        cls,
        *,
        endpoint: str = "",
        type: str = "",  # noqa: A002  # the attribute's name on the wire
        effect: Effect = Effect.KEYED,
        **config: Any,
    ) -> None:
        super().__init_subclass__(**config)
        if endpoint and not type:
            raise TypeError(f"{cls.__name__}: a command with an endpoint= names a type= too")
        if type:
            cls.endpoint_, cls.type_, cls.effect_ = endpoint, type, Effect(effect)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for base in cls.__mro__:
            generic = cast("dict[str, Any]", getattr(base, "__pydantic_generic_metadata__", {}))
            if generic.get("origin") is Command:
                reply = generic["args"][0]
                cls.reply_ = NOTHING if reply in (None, type(None)) else TypeAdapter(reply)
                return

    def as_action(self) -> dict[str, Json]:
        if not self.endpoint_:
            raise TypeError(f"{type(self).__name__} names no endpoint= and type=, so nobody can act on it")
        return {
            "do": "call",
            "endpoint": self.endpoint_,
            "name": self.type_,
            "data": self.model_dump(mode="json"),
            **({"effect": str(self.effect_)} if self.effect_ is not Effect.KEYED else {}),
            **marks(data=places_of(type(self)), value=places_of(self.reply_)),
        }


class Event(BaseModel):
    """A fact that somebody published. `key=` names the field by which a flow waits for it; that is not Sensitive."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, hide_input_in_errors=True)

    type_: ClassVar[str] = ""
    key_: ClassVar[str | None] = None

    def __init_subclass__(
        cls,
        *,
        type: str = "",  # noqa: A002  # the attribute's name on the wire
        key: str | None = None,
        **config: Any,
    ) -> None:
        super().__init_subclass__(**config)
        if type:
            cls.type_, cls.key_ = type, key

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.key_ is not None and any(place in ("", f"/{cls.key_}") for place in places_of(cls)):
            raise TypeError(f"{cls.__name__}: key={cls.key_!r} is Sensitive, and keys are shown and searched")


@dataclass(frozen=True, slots=True)
class Loose:
    """A command without a class: the quick form, and what documents use."""

    endpoint: str
    type: str
    data: Json = None

    def as_action(self) -> dict[str, Json]:
        return {"do": "call", "endpoint": self.endpoint, "name": self.type, "data": plain(self.data)}


def command(endpoint: str, type: str, data: Json = None) -> Loose:  # noqa: A002  # the attribute's name on the wire
    """A command named by strings, for data that no class describes."""
    return Loose(endpoint, type, data)


SCALARS: Final = (str, int, float)


def plain(value: Json) -> Json:
    """`value` as JSON-like data: models, dates, UUIDs and the like by pydantic's rules.

    What has no such form stays as it is, so that whoever encodes it can name the place.
    """
    if value is None or isinstance(value, SCALARS):
        return value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        return value
