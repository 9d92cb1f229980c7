"""`waypost endpoint show`, `set`, `enable` and `disable`: endpoints that are registered."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from contracts.backoff import COMMAND_SCHEDULE, EVENT_SCHEDULE, BadSchedule, Schedule
from contracts.errors import shown
from contracts.signature import Signer, SigningKey, signer
from orchestrator import bootstrap, endpoints, outbox, registry
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say
from orchestrator.cli.trace import span_of_time
from orchestrator.registry import NotRegistered
from orchestrator.settings import Settings, span
from orchestrator.store.database import Connection
from orchestrator.store.endpoints import EndpointState

T = TypeVar("T")

DEFAULT = "default"

ORDERS = {
    "execution": "in order for each execution",
    "key": "in order for each key",
    None: "in any order",
}
FAULTS = {
    "gone": "it answered 410",
    "failing": "only failures for days",
    "operator": "by an operator",
    None: "",
}


def show(args: Namespace, settings: Settings) -> int:
    found = bootstrap.run(over(settings, lambda conn: endpoints.read(conn, args.name)))
    say(as_json(asdict(found)) if args.output == "json" else told(found))
    return Exit.OK


def set_(args: Namespace, settings: Settings) -> int:
    changes = changes_in(args)
    bootstrap.run(
        over(
            settings,
            lambda conn: endpoints.change(conn, args.name, changes, allow=settings.allow_addresses),
        )
    )
    return said(args, f"is changed: {', '.join(sorted(changes))}.", changed=sorted(changes))


def enable(args: Namespace, settings: Settings) -> int:
    if args.replay_since is not None:
        skipped, back = bootstrap.run(
            over(settings, lambda conn: outbox.enable_since(conn, args.name, args.replay_since))
        )
        words = f"is enabled: {back} dead letters are put back, {skipped} older events are dead letters now."
        return said(args, words, state="enabled", put_back=back, skipped=skipped)
    bootstrap.run(over(settings, lambda conn: endpoints.enable(conn, args.name)))
    return said(args, "is enabled: what waited for it is sent.", state="enabled")


def disable(args: Namespace, settings: Settings) -> int:
    bootstrap.run(over(settings, lambda conn: endpoints.disable(conn, args.name)))
    return said(args, "is disabled: what is meant for it is kept, and waits.", state="disabled")


def remove(args: Namespace, settings: Settings) -> int:
    discarded = bootstrap.run(over(settings, lambda conn: endpoints.remove(conn, args.name)))
    words = f"is removed: {discarded} events that waited for it are discarded."
    return said(args, words, state="removed", discarded=discarded)


def rotate(args: Namespace, settings: Settings) -> int:
    secret = registry.signing_key() if args.key_pair else given(args.secret_file)
    done = bootstrap.run(
        over(
            settings,
            lambda conn: registry.rotate_endpoint(
                conn, settings.vault(), args.name, secret=secret, reference=args.reference, grace=args.grace
            ),
        )
    )
    new = done.secret
    public = new.public.text if isinstance(new, SigningKey) else None
    if args.output == "json":
        said = {"public": public} if public else {}
        say(
            as_json(
                {"name": done.name, "key_id": done.key_id, "secret": None if new is None else new.text} | said
            )
        )
    elif new is None:
        note(f"endpoint {plain(args.name)} is signed for with the secret {plain(args.reference)}, too.")
    elif public is not None:
        note(f"endpoint {plain(args.name)} has a new key. The service verifies with its public half:")
        say(public)
    else:
        note(
            f"endpoint {plain(args.name)} has a new secret, and the old ones end soon. The service verifies with it:"
        )
        say(new.text)
    return Exit.OK


def given(path: str | None) -> Signer | None:
    """The secret or key in a file. Raises BadSecret, which does not repeat it, and OSError."""
    if path is None:
        return None
    return signer(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))


async def over(settings: Settings, act: Callable[[Connection], Awaitable[T]]) -> T:
    """What `act` returns, over a connection of its own."""
    async with bootstrap.connection(settings) as conn:
        return await act(conn)


def said(args: Namespace, words: str, **more: Any) -> int:
    if args.output == "json":
        say(as_json({"name": args.name, **more}))
    else:
        note(f"endpoint {plain(args.name)} {words}")
    return Exit.OK


def changes_in(args: Namespace) -> dict[str, Any]:
    """What was said, by column; None for `default`. Raises NotRegistered."""
    changes: dict[str, Any] = {}
    problems: list[str] = []
    for name, read in (
        ("url", str),
        ("timeout", span),
        ("replies_from", str),
        ("concurrency", whole),
        ("rate", float),
        ("burst", whole),
        ("disable_after", span),
    ):
        text = getattr(args, name)
        if text is None:
            continue
        try:
            changes[name] = None if text in (DEFAULT, "none", "never") and name != "url" else read(text)
        except ValueError as error:
            problems.append(f"{name.replace('_', '-')}: {error}")
    try:
        changes |= schedule_in(args)
    except ValueError as error:
        problems.append(f"schedule: {error}")
    changes |= words_in(args)
    if changes.get("timeout", ...) is None:
        changes["timeout"] = timedelta(seconds=15)
    if changes.get("disable_after", ...) is None and args.disable_after == DEFAULT:
        changes["disable_after"] = timedelta(days=5)
    if not (changes or problems):
        problems.append("expected something to set, found nothing")
    if problems:
        raise NotRegistered(f"endpoint {shown(args.name)}", problems)
    return changes


def words_in(args: Namespace) -> dict[str, Any]:
    """What needs no reading: headers, files, and words that are one of a few."""
    said: dict[str, Any] = {}
    for name, pairs in (("headers", args.header), ("tls", args.tls)):
        if pairs:
            said[name] = {} if ("", "") in pairs else dict(pairs)
    for name in ("idempotency", "mode", "on_dead"):
        if getattr(args, name) is not None:
            said[name] = getattr(args, name)
    if args.ordered is not None:
        said["ordered_by"] = None if args.ordered == "none" else args.ordered
    return said


def schedule_in(args: Namespace) -> dict[str, Any]:
    """The schedule that is said, by its column; nothing when none is. Raises ValueError."""
    parts = {
        "factor": args.factor,
        "cap": args.cap and span(args.cap).total_seconds(),
        "attempts": args.attempts and whole(args.attempts),
        "age": args.age and span(args.age).total_seconds(),
        "jitter": args.jitter,
    }
    options: dict[str, Any] = {
        name: float(value) if isinstance(value, str) else value
        for name, value in parts.items()
        if value is not None
    }
    if args.schedule is None:
        if options:
            raise ValueError("expected --schedule with its delays, found other parts of one")
        return {}
    if args.schedule == DEFAULT:
        return {"schedule": None}
    delays = tuple(span(word).total_seconds() for word in args.schedule.replace(",", " ").split())
    try:
        return {"schedule": Schedule(delays, **options).as_json()}
    except BadSchedule as error:
        raise ValueError(str(error)) from None


def when(moment: datetime, now: datetime) -> str:
    """`in 20 s`, or that it may be now."""
    return ago(moment, now=now) if moment > now else "when one is due"


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a whole number, found {shown(text)}")
    return int(text)


def told(found: EndpointState) -> str:
    now = datetime.now(UTC)
    default = COMMAND_SCHEDULE if found.kind == "command" else EVENT_SCHEDULE
    rows = {
        "url": found.url,
        "kind": found.kind,
        "state": f"{found.state} {FAULTS[found.fault]}".strip(),
        "paused until": found.paused_until and f"{found.paused_until:%Y-%m-%d %H:%M:%S} UTC",
        "failing since": found.failing_since and f"{ago(found.failing_since, now=now)}",
        "circuit": found.open_until and f"open: one try, {when(found.open_until, now)}",
        "last minute": f"{found.failures} of {found.tries} tries failed" if found.tries else None,
        "timeout": f"{found.timeout.total_seconds():g} s",
        "replies from": found.replies_from if found.kind == "command" else None,
        "schedule": str(Schedule.of(found.schedule) if found.schedule else default),
        "concurrency": found.concurrency or "as the relay has it",
        "rate": found.rate and f"{found.rate:g} a second, {found.burst or 'a second of them'} at once",
        "disabled after": f"{span_of_time(found.disable_after).split(' 0 ')[0]} of failures alone"
        if found.disable_after
        else "never",
        "headers": ", ".join(found.headers) or None,
        "mode": found.mode if found.mode != "structured" else None,
        "idempotency": found.idempotency if found.idempotency != "bare" else None,
        "tls": ", ".join(f"{name} {path}" for name, path in sorted(found.tls.items())) or None,
        "commands": ORDERS[found.ordered_by] if found.kind == "command" else None,
        "dead in a lane": None
        if found.kind == "command"
        else "the next one goes"
        if found.on_dead == "skip"
        else "the lane stops",
        "secrets": found.secrets,
        "waiting": found.waiting,
        "dead letters": found.dead,
    }
    return "\n".join(
        [
            f"endpoint {plain(found.name)}",
            *(f"  {name:<15}{plain(v)}" for name, v in rows.items() if v is not None),
        ]
    )
