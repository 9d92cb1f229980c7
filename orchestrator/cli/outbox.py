"""`waypost outbox`, `delivery` and `dlq`: messages, their tries, and dead letters."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from contracts.errors import ContractViolation
from orchestrator import bootstrap, discretion, endpoints
from orchestrator import outbox as messages
from orchestrator.cli.endpoints import over
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.outbox import DEAD, Filter, Seen, UnknownTry, attributes_of
from orchestrator.registry import TENANT
from orchestrator.settings import Settings
from orchestrator.store.database import Connection
from orchestrator.store.outbox import DeliveryRow, MessageRow

OPEN = ("waiting", "due", "sending", "stopping")


class NothingNamed(ContractViolation):
    """What to put back was not said."""

    code = "nothing-named"


def outbox(args: Namespace, settings: Settings) -> int:
    if args.verb == "show":
        return show(args, settings)
    return listed(args, settings, states=tuple(args.state) or OPEN)


def delivery(args: Namespace, settings: Settings) -> int:
    if args.verb == "curl":
        say(bootstrap.run(over(settings, lambda conn: curl(conn, args.id))))
        return Exit.OK
    if args.verb == "replay":
        done = bootstrap.run(
            over(settings, lambda conn: messages.send_again(conn, args.ids, as_new=args.as_new))
        )
        return told(args, done, "sent again", of="message")
    seen = bootstrap.run(over(settings, lambda conn: see(conn, args.id)))
    if args.verb == "show":
        found = one_of(seen, args.number)
        say(as_json(asdict(found)) if args.output == "json" else try_of(seen, found))
    elif args.output == "json":
        say(as_json([asdict(row) for row in seen.tries]))
    else:
        say(tries_of(seen))
    return Exit.OK


def one_of(seen: Seen, number: int | None) -> DeliveryRow:
    """The try of that number, or the last one. Raises UnknownTry."""
    found = next((row for row in seen.tries if number in (None, row.attempt)), None)
    if found is None:
        raise UnknownTry(UUID(seen.message.message_id), number)
    return found


def try_of(seen: Seen, row: DeliveryRow) -> str:
    answer = row.status or row.error_code or "no answer"
    took = f"took {row.duration.total_seconds():.3f} s"
    head = (
        f"try {row.attempt} of message {seen.message.message_id} to endpoint {plain(seen.message.endpoint)}"
    )
    to = messages.moved(row)
    hint = [] if to is None else [f"a redirect to {plain(to)}, which is not followed"]
    return "\n".join(
        [
            f"{head}, at {row.started_at:%Y-%m-%d %H:%M:%S} UTC, {took}: {answer}, {row.outcome}",
            *hint,
            *(f"  {name}: {plain(value)}" for name, value in sorted((row.headers or {}).items())),
            "",
            plain((row.response or b"").decode("utf-8", "backslashreplace")),
        ]
    )


def dlq(args: Namespace, settings: Settings) -> int:
    match args.verb:
        case "list":
            return listed(args, settings, states=DEAD)
        case "show":
            return show(args, settings)
        case "discard":
            done = bootstrap.run(over(settings, lambda conn: messages.discard(conn, args.ids)))
            return told(args, done, "discarded")
        case _:
            return replay(args, settings)


async def see(conn: Connection, message: UUID) -> Seen:
    """As people may see it."""
    return await discretion.message(conn, await messages.see(conn, message), tenant=TENANT)


async def curl(conn: Connection, message: UUID) -> str:
    seen = await messages.see(conn, message)
    endpoint = await endpoints.read(conn, seen.message.endpoint)
    return messages.curl(seen, endpoint.url)


def replay(args: Namespace, settings: Settings) -> int:
    which = filter_of(args, DEAD)
    if not (args.ids or args.all or args.endpoint or args.type or args.code or args.since or args.until):
        raise NothingNamed("dlq replay: expected ids, a filter such as --endpoint, or --all; found nothing")
    spread = timedelta(seconds=1 / args.rate) if args.rate else timedelta(0)

    async def act(conn: Connection) -> list[str]:
        found = await chosen(conn, args, which)
        if args.dry_run:
            return [row.message_id for row in found]
        ids = [UUID(row.message_id) for row in found]
        return await messages.put_back(conn, ids, spread=spread, as_new=args.as_new)

    done = bootstrap.run(over(settings, act))
    return told(args, done, "would be put back" if args.dry_run else "put back")


async def chosen(conn: Connection, args: Namespace, which: Filter) -> list[MessageRow]:
    """What would be put back: dead letters of events, in the order in which they would go."""
    if args.ids:
        rows = [(await messages.see(conn, one)).message for one in args.ids]
    else:
        rows = await messages.all_of(conn, which, limit=args.limit)
    return [row for row in rows if row.state == "dead" and not row.command]


def told(args: Namespace, done: Sequence[str], words: str, *, of: str = "dead letter") -> int:
    if args.output == "json":
        say(as_json({"messages": list(done)}))
        return Exit.OK
    note(f"{len(done)} {of if len(done) == 1 else f'{of}s'} {words}.")
    for message in done:
        say(message)
    return Exit.OK


def filter_of(args: Namespace, states: tuple[str, ...]) -> Filter:
    return Filter(
        states,
        endpoint=args.endpoint,
        type=args.type,
        code=getattr(args, "code", None),
        since=args.since,
        until=args.until,
        lane=getattr(args, "lane", None),
        after=getattr(args, "after", None),
    )


def listed(args: Namespace, settings: Settings, *, states: tuple[str, ...]) -> int:
    which = filter_of(args, states)
    found = bootstrap.run(over(settings, lambda conn: messages.all_of(conn, which, limit=args.limit)))
    if args.output == "json":
        say(as_json([as_data(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    rows = (
        (
            row.message_id,
            row.endpoint,
            attributes_of(row).get("type", "?"),
            row.state,
            row.fault or "-",
            row.attempts,
            row.lane if row.ordered else "-",
            ago(row.since, now=now),
        )
        for row in found
    )
    say(table(("MESSAGE", "ENDPOINT", "TYPE", "STATE", "REASON", "TRIES", "LANE", "AGE"), rows))
    return Exit.OK


def as_data(row: MessageRow) -> dict[str, Any]:
    """A message without its body, which may be anything."""
    said = asdict(row)
    del said["body"]
    return said | {"type": attributes_of(row).get("type"), "bytes": len(row.body)}


def show(args: Namespace, settings: Settings) -> int:
    seen = bootstrap.run(over(settings, lambda conn: see(conn, args.id)))
    if args.output == "json":
        body = seen.message.body.decode("utf-8", "backslashreplace")
        tries = [asdict(row) for row in seen.tries]
        why = messages.explained(seen)
        say(
            as_json(as_data(seen.message) | {"body": body, "tries": tries, "behind": seen.behind, "why": why})
        )
        return Exit.OK
    it = seen.message
    say(
        "\n".join(
            [
                f"message {it.message_id} of type {plain(seen.type)} to endpoint {plain(it.endpoint)}: {it.state}",
                plain(messages.explained(seen)) + ".",
                "",
                tries_of(seen),
                "",
                plain(it.body.decode("utf-8", "backslashreplace")),
            ]
        )
    )
    return Exit.OK


def tries_of(seen: Seen) -> str:
    rows = (
        (
            row.attempt,
            f"{row.started_at:%Y-%m-%d %H:%M:%S}",
            f"{row.duration.total_seconds():.3f} s",
            row.outcome,
            row.status or row.error_code or "-",
            plain(said_in(row))[:60],
        )
        for row in seen.tries
    )
    return table(("TRY", "AT (UTC)", "TOOK", "OUTCOME", "ANSWER", "SAID"), rows)


def said_in(row: DeliveryRow) -> str:
    """What is worth a column of an answer: where a redirect leads, else how its body begins."""
    to = messages.moved(row)
    return (row.response or b"").decode("utf-8", "backslashreplace") if to is None else f"to {to}"
