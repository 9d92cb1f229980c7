"""What a statement is about: the facts that it stores, the messages that it claims or settles, the mail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg

from tests.crash.guard import Guard
from tests.crash.points import FOUND, NOTHING, Subject

Parameters = Mapping[str, Any]
Cursor = psycopg.AsyncCursor[Any] | psycopg.Cursor[Any]

ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)')
"""Of an array literal."""
ESCAPED: Final = re.compile(r"\\(.)")


def asked(guard: Guard, name: str, parameters: Parameters) -> list[Subject]:
    """By the parameters; nothing in particular when they do not tell."""
    describe = BY_PARAMETERS.get(name)
    return [] if describe is None else describe(guard, parameters)


def answered(guard: Guard, name: str, parameters: Parameters, cursor: Cursor) -> list[Subject]:
    """By the parameters, or by the answer, which nobody has fetched yet."""
    describe = BY_ANSWER.get(name)
    return asked(guard, name, parameters) if describe is None else describe(guard, cursor)


def facts(_: Guard, said: Parameters) -> list[Subject]:
    """The facts of turns; an end says which."""
    ends = dict(zip(elements(said["t_id"]), elements(said["t_status"]), strict=True))
    columns = (elements(said[name]) for name in ("j_id", "j_kind", "j_path"))
    found = [
        Subject(f"{kind} {ends[execution] if kind == 'finished' else path}".strip(), execution)
        for execution, kind, path in zip(*columns, strict=True)
    ]
    return found or [Subject("no fact", execution) for execution in ends]


def mail(guard: Guard, said: Parameters) -> list[Subject]:
    """Events by their type; what has no body is an order, and says which."""
    kinds = elements(said["kinds"])
    datas = elements(said["datas"] or "") or [""] * len(kinds)
    columns = kinds, said["bodies"] or [None] * len(kinds), datas
    return [
        Subject(f"{kind} {json.loads(data or '{}').get('order')}") if body is None else guard.note(body)
        for kind, body, data in zip(*columns, strict=True)
    ]


def replies(guard: Guard, said: Parameters) -> list[Subject]:
    return [guard.note(body) for body in said["body"]]


def results(guard: Guard, said: Parameters) -> list[Subject]:
    """Messages, each with what became of its try."""
    pairs = zip(said["message"], said["outcome"], strict=True)
    return [guard.known(message, f" {outcome}") for message, outcome in pairs]


def delivered(guard: Guard, said: Parameters) -> list[Subject]:
    return [guard.known(message) for message in said["message"]]


def remembered(guard: Guard, said: Parameters) -> list[Subject]:
    return [guard.known(said["message"])]


def script(_: Guard, said: Parameters) -> list[Subject]:
    return [Subject(said["name"])]


BY_PARAMETERS: Final[Mapping[str, Callable[[Guard, Parameters], list[Subject]]]] = {
    "migrations.runner.RECORD": script,
    "orchestrator.store.commits.COMMIT": facts,
    "orchestrator.store.commits.COMMIT_MUTEXES": facts,
    "orchestrator.store.commits.COMMIT_MUTEXES_TRACED": facts,
    "orchestrator.store.commits.COMMIT_EMITTING": facts,
    "orchestrator.store.commits.COMMIT_PUBLISHING": facts,
    "orchestrator.store.commits.COMMIT_TASKED": facts,
    "orchestrator.store.commits.COMMIT_TRACED": facts,
    "orchestrator.store.commits.COMMIT_WAITS": facts,
    "orchestrator.store.commits.COMMIT_WAITS_TRACED": facts,
    "receiver.inbox.POST": mail,
    "receiver.inbox.POST_TRACED": mail,
    "receiver.memory.BAR": remembered,
    "receiver.memory.RELEASE": remembered,
    "receiver.memory.RUN": remembered,
    "receiver.memory.SETTLE": remembered,
    "relay.outbox.DELIVER": delivered,
    "relay.outbox.RECORD": results,
    "relay.outbox.RECORD_TRACED": results,
    "relay.outbox.SETTLE": results,
    "relay.replies.POST": replies,
}


def messages(guard: Guard, cursor: Cursor) -> list[Subject]:
    """The messages that were claimed."""
    result = cursor.pgresult
    assert result is not None, "a statement that was executed has an answer"
    body = [result.fname(place) for place in range(result.nfields)].index(b"body")
    texts = [result.get_value(row, body) or b"" for row in range(result.ntuples)]
    return [guard.note(bytes.fromhex(text[2:].decode())) for text in texts] or [Subject(NOTHING)]


def rows(_: Guard, cursor: Cursor) -> list[Subject]:
    return [Subject(FOUND if cursor.rowcount > 0 else NOTHING)]


def count(_: Guard, cursor: Cursor) -> list[Subject]:
    result = cursor.pgresult
    return [Subject(NOTHING if result is None or result.get_value(0, 0) == b"0" else FOUND)]


BY_ANSWER: Final[Mapping[str, Callable[[Guard, Cursor], list[Subject]]]] = {
    "orchestrator.store.executions.CLAIM": rows,
    "orchestrator.store.handing.HAND": rows,
    "orchestrator.store.spans.DROP_OLD": rows,
    "orchestrator.store.spans.TAKE": rows,
    "orchestrator.store.workers.BURY": rows,
    "orchestrator.store.workers.TAKE_OVER": rows,
    "relay.outbox.ADVANCE": count,
    "relay.outbox.CLAIM": messages,
    "relay.outbox.CLAIM_GUARDED": messages,
    "orchestrator.store.mutexes.GRANT": count,
    "orchestrator.store.tasks.CLAIM": rows,
    "relay.outbox.EXPIRE_CLAIMS": count,
    "relay.outbox.EXPIRE_DUE": rows,
}
"""What is said again and again, and mostly finds nothing."""


def elements(array: str) -> list[str]:
    """The elements of an array literal; null is empty."""
    return [
        ESCAPED.sub(r"\1", text) or ("" if bare == "null" else bare) for text, bare in ELEMENT.findall(array)
    ]
