"""`waypost simulate`: an endpoint that misbehaves, and providers that post webhooks, for tests of one's own.

What is shown of a request is its id, its key, its size, whether its signature is right; never a body, the value of
another header, or a secret.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from contracts.errors import BadSecret
from contracts.limits import EVENT_BYTES_MAX
from contracts.signature import PUBLIC_PREFIX, PublicKey, Secret, Verifier
from orchestrator import bootstrap
from orchestrator.cli.output import Exit, as_json, note, plain, say, table
from orchestrator.cli.register import members
from orchestrator.settings import Settings
from orchestrator.simulators.kinds import ANY, KINDS, SCRIPT_BYTES_MAX, scripted
from orchestrator.simulators.plan import Delivery
from orchestrator.simulators.provider import Report
from orchestrator.simulators.provider import provider as providing
from orchestrator.simulators.zoo import Seen, zoo
from receiver.listener import CannotListen

NAMED_MAX: Final = 20
"""Of what was not accepted, in a report for people."""
PLANNED: Final = ("count", "rate", "duplicates", "reorder", "speed", "skew", "type")
"""Options that a plan has under the same names."""


def simulate(args: Namespace, settings: Settings) -> int:
    del settings
    return VERBS[args.verb](args)


def endpoint(args: Namespace) -> int:
    if args.list:
        return list_behaviours(args.output)
    script = scripted(head_of(args.script, SCRIPT_BYTES_MAX)) if args.script else {}
    if args.behaviour:
        script[ANY] = args.behaviour
    secrets = [verifier(name) for name in args.secret_env]
    bootstrap.run(serve(script, secrets, args.addr))
    return Exit.OK


def list_behaviours(form: str) -> int:
    rows = [(kind.usage(name), kind.does) for name, kind in KINDS.items()]
    if form == "json":
        say(as_json([{"behaviour": usage, "does": does} for usage, does in rows]))
    else:
        say(table(("BEHAVIOUR", "ANSWERS"), rows))
    return Exit.OK


async def serve(script: dict[str, list[str]], secrets: list[Verifier], address: tuple[str, int]) -> None:
    """Until a signal, or until nobody reads what is said."""
    async with bootstrap.stopping() as stop:
        unread: list[BrokenPipeError] = []

        def told(seen: Seen) -> None:
            try:
                say(line(seen))
            except BrokenPipeError as error:
                unread.append(error)
                stop.set()

        async with AsyncExitStack() as stack:
            listening = zoo(secrets=secrets, script=script, told=told, address=address)
            try:
                here = await stack.enter_async_context(listening)
            except OSError as error:
                raise CannotListen("--addr", *address, error) from None
            say(json.dumps({"url": here.url}))
            note(
                f"Listening at {here.url}; `waypost simulate endpoint --list` says what its paths do. Ctrl-C stops."
            )
            await stop.wait()
        if unread:
            raise unread[0]


def line(seen: Seen) -> str:
    """A request as one line of visible ASCII."""
    return json.dumps(seen.as_json())


def verifier(name: str) -> Verifier:
    """What the variable of that name holds: a secret `whsec_…`, or a public key `whpk_…`. Raises BadSecret."""
    text = variable(name)
    return PublicKey.parse(text) if text.startswith(PUBLIC_PREFIX) else Secret.parse(text)


def variable(name: str) -> str:
    text = os.environ.get(name, "").strip()
    if not text:
        raise BadSecret(f"secret: expected one in the variable {name} of the environment, found none")
    return text


def head_of(path: str, bytes_max: int) -> bytes:
    """A file, and a byte more than it may have when it is larger."""
    with Path(path).open("rb") as file:
        return file.read(bytes_max + 1)


def provider(args: Namespace) -> int:
    settings = members(args.settings) or {}
    body = head_of(args.body, EVENT_BYTES_MAX).decode("utf-8", "replace") if args.body else ""
    secret, rotate_to = variable(args.secret_env), variable(args.rotate) if args.rotate else ""
    how = {name: getattr(args, name) for name in PLANNED} | {"body": body, "rotate_to": rotate_to}
    report = bootstrap.run(post(args, settings, secret, how))
    say(as_json(report.as_json()) if args.output == "json" else "\n".join(lines_of(report)))
    if report.stopped:
        return Exit.INTERRUPTED
    return Exit.OK if report.all_accepted else Exit.FAILED


async def post(args: Namespace, settings: Mapping[str, Any], secret: str, how: Mapping[str, Any]) -> Report:
    async with (
        bootstrap.stopping() as stop,
        providing(
            args.name,
            to=args.to,
            secret=secret,
            settings=settings,
            allow_hosts=args.allow_host,
            seed=args.seed,
        ) as it,
    ):
        return await it.sends(stop=stop, told=waits, **how)


def waits(delivery: Delivery, seconds: float) -> None:
    """Say why nothing happens for long."""
    if seconds >= 1:
        note(
            f"{delivery.id}: {delivery.last}; it comes again in {seconds:.0f} s, sooner with a higher --speed"
        )


def lines_of(report: Report) -> list[str]:
    """The report for people: what did not arrive is named, as far as anybody reads."""
    failed = [it for it in report.deliveries if not it.accepted]
    answers = ", ".join(
        f"{count} \N{MULTIPLICATION SIGN} {answer}" for answer, count in sorted(report.answers.items())
    )
    return [
        f"{report.provider} to {plain(report.to)}, seed {report.seed}{', stopped' if report.stopped else ''}",
        f"{report.events} events and {report.copies} copies: {report.accepted} accepted",
        f"{report.requests} requests, {report.retried} of them retries",
        f"answers: {answers or 'none'}",
        *(
            f"not accepted: {it.id}, tried {it.tries} times, last {it.last or 'never'}"
            for it in failed[:NAMED_MAX]
        ),
        *([f"and {len(failed) - NAMED_MAX} more; -o json names all"] if len(failed) > NAMED_MAX else []),
    ]


VERBS: Final = {"endpoint": endpoint, "provider": provider}
