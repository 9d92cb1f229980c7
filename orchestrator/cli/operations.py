"""Starting executions, looking at them, and deciding about those that are held."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from contracts import strict_json
from contracts.errors import ContractViolation, shown
from contracts.limits import PAYLOAD_BYTES_MAX, PAYLOAD_STORED_BYTES_MAX
from orchestrator import bootstrap, discretion
from orchestrator.cli import advice
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table, terminal_width
from orchestrator.cli.tasks import HEADINGS
from orchestrator.cli.tasks import cells as cells_of
from orchestrator.client import Client, ExecutionView
from orchestrator.conditions import conditions
from orchestrator.core.status import TERMINAL, Status
from orchestrator.settings import Settings
from orchestrator.store import versions
from orchestrator.store.reading import ExecutionRow, FactRow
from orchestrator.store.tasks import TaskRow
from orchestrator.store.tries import TryRow, served, tries

TENANT: Final = 1
WAIT: Final = timedelta(minutes=5)  # of `start --wait`, if nothing else is said
WORDS_CHARACTERS_MAX: Final = 100  # of a fact's data in a table; `-o json` has all of it


def start(args: Namespace, settings: Settings) -> int:
    if args.timeout is not None and not args.wait:
        raise ContractViolation(
            "--timeout: expected beside --wait, found without it; how long a step may take is said in the flow"
        )
    return bootstrap.run(start_one(args, settings))


async def start_one(args: Namespace, settings: Settings) -> int:
    name, _, version = args.flow.partition("@")
    flows = bootstrap.flows_of(settings, args.module)
    flow = flows.get(name, version or None)
    most = PAYLOAD_BYTES_MAX if settings.payload_store is None else PAYLOAD_STORED_BYTES_MAX
    given = strict_json.decode(read(args.input), what="--input", bytes_max=most)
    async with bootstrap.connection(settings) as conn, bootstrap.client_over(conn) as client:
        if not version:
            drawn = await versions.drawn(conn, name, args.key or str(uuid4()), tenant=TENANT)
            flow = flows.get(name, drawn) if (name, drawn) in flows.names() else flow
        started = await client.start(flow, given, key=args.key, deadline=args.deadline)
        if started.outcome == "exists":
            note(f"Key {plain(args.key)} was started before with this input; this is its execution.")
        if args.wait:
            note(f"started {started.execution_id}")
            return await wait(client, started.execution_id, patience=args.timeout or WAIT, shape=args.output)
    say(as_json(asdict(started)) if args.output == "json" else str(started.execution_id))
    return Exit.OK


async def wait(client: Client, execution: UUID, *, patience: timedelta, shape: str) -> int:
    """Until it is finished, or held: then it waits for a person, and we do not."""
    began = time.monotonic()
    try:
        await client.until_over(execution, seconds=patience.total_seconds())
        view = await client.shown(execution)
    except TimeoutError:
        state = (await client.shown(execution)).row.state
        note(f"waypost: {execution} is still {state} after {time.monotonic() - began:.0f} s")
        return Exit.TIMED_OUT
    if shape == "json":
        say(as_json({**asdict(view.row), "output": view.output, "error": view.error}))
    else:
        say(f"{view.row.execution_id}  {view.row.state}{because(view)}")
    return Exit.OK if view.row.status == Status.COMPLETED else Exit.FAILED


def read(text: str) -> str | bytes:
    """JSON as given, or of @FILE, or of stdin (-)."""
    if text == "-":
        return sys.stdin.buffer.read(PAYLOAD_STORED_BYTES_MAX + 1)
    if text.startswith("@"):
        try:
            with Path(text[1:]).open("rb") as file:
                return file.read(PAYLOAD_STORED_BYTES_MAX + 1)
        except (OSError, ValueError) as error:
            raise ContractViolation(
                f"--input: expected a readable file, found {shown(text)}: {error}"
            ) from None
    if text.endswith(".json"):
        raise ContractViolation(
            f"--input: expected JSON or @FILE, found {shown(text)}; say @ before a file's name"
        )
    return text


def show(args: Namespace, settings: Settings) -> int:
    view, tried, is_served, left = bootstrap.run(look_at(args.id, settings))
    if args.output == "json":
        say(as_json(whole(view, tried) | {"tasks": [asdict(one) for one in left]}))
    else:
        queued = [table(HEADINGS, map(cells_of, left))] if left else []
        say("\n\n".join([*described(view, tried, is_served=is_served), *queued]))
    return Exit.OK


async def look_at(
    execution: UUID, settings: Settings
) -> tuple[ExecutionView, list[TryRow], bool, list[TaskRow]]:
    async with bootstrap.connection(settings) as conn:
        view = await Client(conn).shown(execution)
        tried = await tries(conn, view.row.execution_id, tenant=TENANT)
        left = await discretion.tasks_of(conn, view.row.execution_id, tenant=TENANT)
        return view, tried, await served(conn, view.row.definition, view.row.version), left


def whole(view: ExecutionView, tried: Iterable[TryRow]) -> dict[str, Any]:
    facts = [{**asdict(fact), "payload": payload_of(fact)} for fact in view.facts]
    return {
        **asdict(view.row),
        "output": view.output,
        "error": view.error,
        "held": None if view.held is None else asdict(view.held),
        "stands": [asdict(one) for one in view.stands],
        "journal": facts,
        "children": [asdict(child) for child in view.children],
        "messages": [asdict(message) for message in view.messages],
        "tries": [asdict(one) for one in tried],
    }


def described(view: ExecutionView, tried: Iterable[TryRow], *, is_served: bool) -> Iterable[str]:
    """The parts of `show`: a head, the journal, the children, the messages."""
    row, now = view.row, datetime.now(UTC)
    key = f"  key {plain(row.business_key)}" if row.business_key else ""
    yield "\n".join(
        (
            f"{row.execution_id}  {plain(row.definition)}@{plain(row.version)}{key}",
            *([f"child of {row.parent} at {plain(row.parent_path)}"] if row.parent else []),
            (
                f"{row.state}{' (undoing)' if row.undoing and row.finished_at is None else ''}{because(view)}"
                f"{advice.unserved(view, is_served)}"
            ),
            *([f"decide: {decision}"] if (decision := advice.decision(view)) else []),
            *([f"still standing: {standing}"] if (standing := advice.standing(view)) else []),
            *([f"published: {published(row)}"] if row.attributes else []),
            f"created {ago(row.created_at, now=now)} ago{progress(row, now)}",
        )
    )
    yield table(
        ("FACT", "AT", "KIND", "PATH", "BY", "WHAT"),
        (
            (it.position, f"{it.at:%H:%M:%S.%f}"[:-3], it.kind, it.path, it.actor, words(it))
            for it in view.facts
        ),
        width=terminal_width(),
    )
    if view.children:
        yield table(
            ("CHILD", "PATH", "FLOW", "KEY", "STATE"),
            (
                (it.execution_id, it.path, f"{it.definition}@{it.version}", it.business_key or "", it.state)
                for it in view.children
            ),
        )
    if view.messages:
        of: dict[str, list[TryRow]] = defaultdict(list)
        for one in tried:
            of[one.message_id].append(one)
        yield table(
            ("MESSAGE", "PATH", "ENDPOINT", "STATE", "TRIES"),
            (
                (
                    it.message_id,
                    it.path,
                    it.endpoint,
                    it.state,
                    advice.answers(it, of[it.message_id], now=now),
                )
                for it in view.messages
            ),
        )


def published(row: ExecutionRow) -> str:
    return ", ".join(f"{name}={plain(briefly(value))}" for name, value in sorted(row.attributes.items()))


def progress(row: ExecutionRow, now: datetime) -> str:
    if row.finished_at is not None:
        return f", finished after {(row.finished_at - row.created_at).total_seconds():.1f} s"
    ends = "" if row.deadline_at is None else f", deadline {advice.due(row.deadline_at, now=now)}"
    next_ = f"next look {advice.due(row.wake_at, now=now)}" if row.wake_at is not None else "waits for mail"
    return f", {next_}{ends}"


def payload_of(fact: FactRow) -> Any:
    return None if fact.payload is None else json.loads(fact.payload)


def words(fact: FactRow) -> str:
    """A fact in one line of bounded length, for people; programs read the payload."""
    said: dict[str, Any] = payload_of(fact) or {}
    match fact.kind:
        case "started" | "continued":
            text = briefly(said.get("input"))
        case "asked":
            args: dict[str, Any] = said.get("args") or {}
            to = f" to {args['endpoint']}" if args.get("endpoint") else ""
            to = f" in queue {args['queue']}" if args.get("queue") else to
            text = (
                f"{args.get('name') or args.get('flow') or said.get('name')}{to} {briefly(args.get('data'))}"
            )
        case "received":
            text = f"{said.get('type')} {said.get('key') or ''} {briefly(said.get('data'))}"
        case "ended" if "of" in said:
            text = f"{said['outcome']}: the event of fact {said['of']}"
        case "noted" if said.get("kind") == "publish":
            text = f"publish {briefly(said.get('args'))}"
        case "withdrawn" | "noted":
            text = f"{said.get('kind')} {said.get('name')}"
        case "terminated":
            text = f"{said.get('by')}: {said.get('reason')}"
        case "finished":
            text = f"{said.get('kind')} {briefly(said.get('output', said.get('error', said.get('input'))))}"
        case _ if "outcome" in said:
            text = f"{said['outcome']} {briefly(said.get('value', said.get('error')))}"
        case _:
            text = briefly(said)
    return text if len(text) <= WORDS_CHARACTERS_MAX else text[:WORDS_CHARACTERS_MAX] + "…"


def briefly(value: Any) -> str:
    return "" if value is None or value == {} else json.dumps(value, ensure_ascii=False)


def because(view: ExecutionView) -> str:
    """Why it failed, or what it waits for a person with."""
    if (held := view.held) is not None:
        parts = [held.code, f"at {held.path}" if held.path else "", held.reason]
    elif (error := view.error) is not None:
        parts = [str(error.get("code") or ""), str(error.get("detail") or "")]
    else:
        parts = []
    found = ": ".join(plain(part) for part in parts if part)
    return f": {found}" if found else ""


def list_executions(args: Namespace, settings: Settings) -> int:
    found = bootstrap.run(listed(args, settings))
    match args.output:
        case "json":
            say(as_json([asdict(row) for row in found]))
        case "ids":
            for row in found:
                say(row.execution_id)
        case _:
            say(table(("EXECUTION", "FLOW", "KEY", "STATE", "AGE", "NEXT", "PARENT"), map(cells, found)))
            needy = sum(row.status == Status.HELD for row in found)
            note(f"{len(found)} shown{f' · {needy} held, for you to decide' if needy else ''}")
    return Exit.OK


def cells(row: ExecutionRow) -> tuple[object, ...]:
    now = datetime.now(UTC)
    undoing = " (undoing)" if row.undoing and row.status not in TERMINAL else ""
    return (
        row.execution_id,
        f"{row.definition}@{row.version}",
        row.business_key or "",
        row.state + undoing,
        ago(row.created_at, now=now),
        advice.due(row.wake_at, now=now),
        row.parent or "",
    )


async def listed(args: Namespace, settings: Settings) -> list[ExecutionRow]:
    async with bootstrap.client(settings) as client:
        states = [args.status] if args.status else None
        return await client.list(
            states=states,
            flow=args.flow,
            key=args.key,
            where=conditions(args.where),
            limit=args.limit,
            parent=args.parent,
        )


def resume(args: Namespace, settings: Settings) -> int:
    bootstrap.run(resume_one(args, settings))
    return decided(args, "goes on where it stopped")


async def resume_one(args: Namespace, settings: Settings) -> None:
    async with bootstrap.client(settings) as client:
        await client.resume(args.id, by=args.by, reason=args.reason)


def cancel(args: Namespace, settings: Settings) -> int:
    bootstrap.run(cancel_one(args, settings))
    return decided(args, f"is asked to end{', and what it did stands' if args.no_undo else ''}")


async def cancel_one(args: Namespace, settings: Settings) -> None:
    async with bootstrap.client(settings) as client:
        await client.cancel(args.id, by=args.by, reason=args.reason, undo=not args.no_undo)


def terminate(args: Namespace, settings: Settings) -> int:
    stands = bootstrap.run(terminate_one(args, settings))
    if args.output == "json":
        said = {"by": args.by, "reason": args.reason, "stands": stands}
        say(as_json({"execution_id": args.id, "order": "terminate", **said}))
    else:
        left = f"; still standing: {', '.join(map(plain, stands))}" if stands else "; nothing of it stands"
        note(f"{args.id} is terminated{left}.")
    return Exit.OK


async def terminate_one(args: Namespace, settings: Settings) -> list[str]:
    async with bootstrap.client(settings) as client:
        return await client.terminate(args.id, by=args.by, reason=args.reason)


def resolve(args: Namespace, settings: Settings) -> int:
    bootstrap.run(resolve_one(args, settings))
    return decided(args, f"is told {args.verdict} at {plain(args.path)}")


async def resolve_one(args: Namespace, settings: Settings) -> None:
    value = None
    if args.value is not None:
        value = strict_json.decode(args.value, what="--value", bytes_max=PAYLOAD_BYTES_MAX)
    async with bootstrap.client(settings) as client:
        await client.resolve(args.id, args.path, args.verdict, by=args.by, reason=args.reason, value=value)


def decided(args: Namespace, what: str) -> int:
    if args.output == "json":
        said = {name: getattr(args, name) for name in ("path", "verdict", "by", "reason") if name in args}
        undo = {"undo": not args.no_undo} if "no_undo" in args else {}
        say(as_json({"execution_id": args.id, "order": args.command, **undo, **said}))
    else:
        note(f"{args.id} {what}; `waypost show {args.id}` shows what becomes of it.")
    return Exit.OK
