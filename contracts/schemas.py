"""Contracts as JSON Schema, for services that are not written in Python.

One document per type:

    {"type", "kind": "command", "endpoint", "effect", "dialect", "request": {…}, "reply": {…}}
    {"type", "kind": "event", "key", "dialect", "data": {…}}

`request`, `reply` and `data` are complete schemas, each with its own `$schema` and `$defs`, so that any of them
can be handed to a validator or a generator as it is. A request is described as it is sent, with every default
filled in; a reply and an event as they are read, where fields with defaults may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast
from urllib.parse import quote

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import core_schema

from contracts.errors import WaypostError, shown
from contracts.messages import NOTHING, Command, Event

Document = dict[str, Any]

SUFFIX: Final = ".contract.json"
"""How the names of files with contracts end, and no other file's name should."""
NO_REPLY: Final = "No result: whatever the service says is passed over."


class ContractsInvalid(WaypostError):
    """Classes that cannot be described; the message names them and says why."""

    code = "contracts-invalid"


class Generator(GenerateJsonSchema):
    """Pydantic's own, but for two things.

    A default that JSON does not have is left out without a word, and what is sent has all fields, those with
    a default too.
    """

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # declared so by its base

    def field_is_required(
        self,
        field: core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField,
        total: bool,  # noqa: FBT001  # pydantic's signature
    ) -> bool:
        if self.mode == "serialization" and field["type"] != "typed-dict-field":
            return field.get("serialization_exclude_if") is None
        return super().field_is_required(field, total)


DIALECT: Final = Generator.schema_dialect


def contracts_in(things: Iterable[object]) -> list[type[Command[Any] | Event]]:
    """The classes among `things` that name a type, each once, in the order of their types."""
    found: dict[type[Command[Any] | Event], None] = {}
    for thing in things:
        if isinstance(thing, type) and issubclass(thing, Command | Event) and thing.type_:
            found[cast("type[Command[Any] | Event]", thing)] = None
    return sorted(found, key=lambda kind: (kind.type_, kind.__module__, kind.__qualname__))


def documents(kinds: Iterable[type[Command[Any] | Event]]) -> list[Document]:
    """The document of each class, in order. Raises ContractsInvalid, also when two classes have one type."""
    known: dict[str, str] = {}
    made: list[Document] = []
    for kind in kinds:
        name, file = f"{kind.__module__}.{kind.__qualname__}", file_name(kind.type_).casefold()
        if file in known:
            raise ContractsInvalid(
                f"{name}: expected one class of type {shown(kind.type_)}, found {known[file]}"
            )
        known[file] = name
        try:
            made.append(document(kind))
        except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError) as error:
            raise ContractsInvalid(f"{name}: it has no JSON Schema: {error.message}") from error
    return made


def document(kind: type[Command[Any] | Event]) -> Document:
    """What services in other languages need to know of one class."""
    if issubclass(kind, Event):
        return {
            "type": kind.type_,
            "kind": "event",
            "key": kind.key_,
            "dialect": DIALECT,
            "data": read_schema(TypeAdapter(kind)),
        }
    return {
        "type": kind.type_,
        "kind": "command",
        "endpoint": kind.endpoint_,
        "effect": str(kind.effect_),
        "dialect": DIALECT,
        "request": sent_schema(kind),
        "reply": {"$schema": DIALECT, "description": NO_REPLY}
        if kind.reply_ is NOTHING
        else read_schema(kind.reply_),
    }


def sent_schema(kind: type[Command[Any]]) -> Document:
    """As `Command.as_action` writes it: by field names, unless the model says that aliases are written."""
    by_alias = bool(kind.model_config.get("serialize_by_alias"))
    made = kind.model_json_schema(by_alias=by_alias, mode="serialization", schema_generator=Generator)
    return {"$schema": DIALECT, **made}


def read_schema(of: TypeAdapter[Any]) -> Document:
    return {"$schema": DIALECT, **of.json_schema(mode="validation", schema_generator=Generator)}


def files(made: Iterable[Document]) -> Mapping[str, bytes]:
    """The content of each file by its name: the same bytes for the same classes, in ASCII."""
    return {file_name(one["type"]): (json.dumps(one, indent=2) + "\n").encode("ascii") for one in made}


def file_name(type: str) -> str:  # noqa: A002  # the attribute's name on the wire
    """The type, with whatever a file's name cannot have written as in a URL."""
    return quote(type, safe="") + SUFFIX
