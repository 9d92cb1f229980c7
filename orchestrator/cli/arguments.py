"""The words that `waypost` understands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from contracts.errors import shown
from orchestrator.core.status import Status
from orchestrator.settings import Address, address_of, span
from orchestrator.simulators.providers import PROVIDERS
from receiver.schemes import PRESETS

REASONS: Final = (
    *("early", "late", "orphaned", "unmatched", "contract", "mapping", "expired", "conflict", "invalid"),
    *("ahead", "superseded"),
)
"""Why something that came moved nothing."""

BINARY: Final = "it may send events in the binary content mode, of which its signature covers the data alone"

SETTINGS: Final = "what is particular to it, as JSON or @FILE: see docs/receiving.md"

VERSION: Final = "0.1.0"
"""That of pyproject.toml, which is not there where the packages are only copied."""

LISTED_MAX: Final = 10_000
"""Executions, endpoints or senders that one `list` shows."""

EPILOG = """\
exit codes:
  0  ok                          5  refused: the state does not allow it, or the name is taken
  1  error                       7  timed out waiting
  2  wrong usage or input        8  finished, but not completed
  4  not found                 130  interrupted

The environment says where the database is (WAYPOST_DATABASE_URL) and which key seals secrets
(WAYPOST_SECRET_KEY); each name may be given as NAME_FILE instead.
"""


def duration(text: str) -> timedelta:
    try:
        return span(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= LISTED_MAX):
        raise argparse.ArgumentTypeError(f"expected 1 to {LISTED_MAX}, found {shown(text)}")
    return int(text)


def percent(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 100):
        raise argparse.ArgumentTypeError(f"expected 0 to 100, found {shown(text)}")
    return int(text)


def key(text: str) -> str:
    """What a shell passes on that is no UTF-8 has no meaning here."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected printable UTF-8 text, found {shown(text)}")
    return text


def attribute(text: str) -> tuple[str, str]:
    if text == "none":
        return "", ""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {shown(text)}")
    return name, value


def execution(text: str) -> UUID:
    return identity(text, "an execution's")


def message(text: str) -> UUID:
    return identity(text, "a message's")


def identity(text: str, whose: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {whose} id, found {shown(text)}") from None


def task_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a task's id, found {shown(text)}") from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="waypost",
        description="Durable sagas over signed webhooks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"waypost {VERSION}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:  # noqa: A002  # argparse's own word
        return commands.add_parser(name, help=help, description=help, allow_abbrev=False)

    add_roles(command)
    add_registry(command)
    add_inbox(command)
    add_operations(command)
    add_tasks(command)
    add_orders(command)
    add_messages(command)
    add_contracts(command)
    add_versions(command)
    add_simulators(command)
    demo = command("demo", "Show it all: start every part and three services, and run four orders.")
    demo.add_argument("--once", action="store_true", help="end when the orders are over")
    dev = command("dev", "Run every part on this machine, with a database in the data folder that is kept.")
    dev.add_argument("modules", nargs="*", metavar="MODULE", help="with flows (else WAYPOST_FLOWS)")
    return top


Command = Callable[[str, str], argparse.ArgumentParser]


def add_roles(command: Command) -> None:
    migrate = command("migrate", "Bring the database's tables up to this release.")
    either = migrate.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="change nothing; exit 1 when anything is to do")
    either.add_argument("--print-sql", action="store_true", help="print the scripts; needs no database")
    worker = command("worker", "Run flows. Any number of workers share the work.")
    worker.add_argument("modules", nargs="*", metavar="MODULE", help="with flows (else WAYPOST_FLOWS)")
    tasks = command("tasks", "Do what waits in queues. Any number of workers share a queue.")
    tasks.add_argument("modules", nargs="+", metavar="MODULE", help="with a Tasks() and its functions")
    tasks.add_argument(
        "--queue",
        action="append",
        required=True,
        type=key,
        metavar="QUEUE",
        help="may be given more than once",
    )
    tasks.add_argument(
        "--concurrency", type=count, default=8, metavar="N", help="at most so many at once (default: 8)"
    )
    command("relay", "Send commands to the services. Any number of relays share the work.")
    command("receiver", "Take replies and events. Any number of receivers share the work.")


def add_registry(command: Command) -> None:
    endpoint = command("endpoint", "Where commands are posted.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    add = endpoint.add_parser("add", help="register one; prints its secret, which is shown only now")
    add.add_argument("name", type=key, metavar="NAME")
    add.add_argument("url", metavar="URL")
    add.add_argument("--kind", choices=("command", "event"), default="command")
    add.add_argument(
        "--timeout",
        type=duration,
        default="15s",
        metavar="SPAN",
        help="of one try, answer included (default: 15s)",
    )
    add.add_argument(
        "--replies-from", metavar="SENDER", help="who may answer (default: the sender of this name)"
    )
    add_secret_options(add)
    add_output(endpoint.add_parser("list", help="where commands are posted now"), "table")
    add_endpoint_verbs(endpoint)
    sender = command("sender", "Who may post to us.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    add = sender.add_parser("add", help="register one; prints its secret, which is shown only now")
    add.add_argument("name", type=key, metavar="NAME")
    add.add_argument("--binary", action="store_true", help=BINARY)
    add.add_argument(
        "--scheme",
        choices=[*PRESETS],
        default="standard-webhooks",
        help="how it proves itself (default: standard-webhooks)",
    )
    add.add_argument("--settings", metavar="JSON", help=SETTINGS)
    add_secret_options(add)
    change = sender.add_parser("set", help="change what one may do")
    change.add_argument("name", type=key, metavar="NAME")
    either = change.add_mutually_exclusive_group()
    either.add_argument("--binary", action="store_true", default=None, help=BINARY)
    either.add_argument("--no-binary", action="store_false", dest="binary", help="it may do so no more")
    change.add_argument("--settings", metavar="JSON", help=f"{SETTINGS}; those that it had are gone")
    change.add_argument(
        "--state",
        choices=("enabled", "disabled", "retired"),
        help="disabled: it is told to come later; retired: it is told to stop",
    )
    add_output(change)
    rotate = sender.add_parser("rotate", help="give one a new secret; prints it, which is shown only now")
    rotate.add_argument("name", type=key, metavar="NAME")
    rotate.add_argument(
        "--grace", type=duration, default="24h", help="the old ones prove it for so long (default: 24h)"
    )
    rotate.add_argument(
        "--secret-file", metavar="FILE", help="use the secret in FILE (- is stdin), instead of a new one"
    )
    add_output(rotate)
    add_output(sender.add_parser("list", help="who may post to us now"), "table")
    subscription = command("subscription", "Who gets published events.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    for verb, help_ in (
        ("add", "send events of a type to an endpoint, too"),
        ("remove", "send it no more of them"),
    ):
        change = subscription.add_parser(verb, help=help_)
        change.add_argument("type", type=key, metavar="TYPE", help="an exact type, or shop.order.*, or *")
        change.add_argument("endpoint", metavar="ENDPOINT", help="one of the kind event")
        if verb == "add":
            change.add_argument(
                "--ordered",
                choices=("key", "execution"),
                help="those of one key, or execution, arrive in order",
            )
            change.add_argument(
                "--where",
                action="append",
                type=attribute,
                default=[],
                metavar="NAME=VALUE",
                help="only events whose attribute NAME is VALUE, such as source=/shop; may be repeated",
            )
        add_output(change)
    add_output(subscription.add_parser("list", help="who gets which events now"), "table")
    mutex = command("mutex", "Who has which mutex, and who waits for it.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    add_output(mutex.add_parser("list", help="who has one now, and how many wait for it"), "table")
    show = mutex.add_parser("show", help="who has the mutexes of a key, and who waits for them")
    show.add_argument("key", type=key, metavar="KEY", help="what the flow or the step says as mutex=")
    add_output(show, "table")


ENDPOINT_OPTIONS = (
    ("--url", "URL", "where messages are posted from now on"),
    ("--timeout", "SPAN", "of one try, answer included"),
    ("--replies-from", "SENDER", "who may answer"),
    ("--schedule", "SPANS", "the waits between tries, such as '5s 5m 1h'; the last one goes on"),
    ("--factor", "N", "after those, each wait is so many times the one before"),
    ("--cap", "SPAN", "no wait is longer"),
    ("--attempts", "N", "after so many tries it is a dead letter"),
    ("--age", "SPAN", "no try is made of what is older"),
    ("--jitter", "N", "each wait varies by this part of it (0 to 1)"),
    ("--concurrency", "N", "tries in flight, in each relay"),
    ("--rate", "N", "messages a second, of all relays together"),
    ("--burst", "N", "so many at once after a pause"),
    ("--disable-after", "SPAN", "of failures alone; or never"),
)


def add_endpoint_verbs(endpoint: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # it has no other name
    for verb, help_ in (
        ("show", "all about one: what is set, how it is doing, what waits"),
        ("set", "change how messages are delivered to one; `default` takes back what was set"),
        ("enable", "send what waits, and forget that it failed"),
        ("disable", "send nothing more; what comes is kept, and waits"),
        ("remove", "take it away, with its secrets and subscriptions; events that wait for it are discarded"),
    ):
        one = endpoint.add_parser(verb, help=help_)
        one.add_argument("name", type=key, metavar="NAME")
        for name, metavar, meaning in ENDPOINT_OPTIONS if verb == "set" else ():
            one.add_argument(name, metavar=metavar, help=meaning)
        if verb == "set":
            for name, metavar, meaning in (
                ("--header", "NAME=VALUE", "a header of its own"),
                ("--tls", "NAME=FILE", "a file of the relay: ca, certificate or key"),
            ):
                one.add_argument(
                    name,
                    action="append",
                    type=attribute,
                    default=[],
                    metavar=metavar,
                    help=f"{meaning}, instead of what was set; may be repeated; `none` takes all back",
                )
            one.add_argument(
                "--idempotency", choices=("bare", "quoted", "off"), help="how Idempotency-Key is written"
            )
            one.add_argument(
                "--mode",
                choices=("structured", "binary"),
                help="attributes in one document with the data, or in headers",
            )
            one.add_argument(
                "--ordered",
                choices=("execution", "key", "none"),
                help="commands of one execution, or of one key, arrive in the order in which they were asked for",
            )
            one.add_argument(
                "--on-dead",
                choices=("block", "skip"),
                help="what a dead letter does to what waits behind it in a lane",
            )
        if verb == "enable":
            one.add_argument(
                "--replay-since",
                type=moment,
                metavar="WHEN",
                help="events made since then, dead letters too; older ones become dead letters",
            )
        add_output(one)
    one = endpoint.add_parser("rotate", help="give one a new secret; prints it, which is shown only now")
    one.add_argument("name", type=key, metavar="NAME")
    one.add_argument(
        "--grace", type=duration, default="24h", help="for the old ones (default: 24h, at most 168h)"
    )
    either = one.add_mutually_exclusive_group()
    either.add_argument(
        "--secret-file", metavar="FILE", help="use the one in FILE (- is stdin), whsec_… or whsk_…"
    )
    either.add_argument("--key-pair", action="store_true", help="a key whose public half the service gets")
    either.add_argument(
        "--reference", metavar="KIND:NAME", help="one that the relay fetches: env:NAME, file:/PATH"
    )
    add_output(one)


def add_inbox(command: Command) -> None:
    inbox = command("inbox", "What came and moved nothing, and why.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    listing = inbox.add_parser("list", help="all of it, the newest first")
    listing.add_argument("--reason", choices=REASONS, help="for this reason only")
    listing.add_argument("--limit", type=count, default=50, metavar="N", help="at most so many (default: 50)")
    add_output(listing, "table")
    for verb, help_ in (
        ("show", "everything about one"),
        ("explain", "which waits it nearly met, and which condition failed"),
        ("redrive", "let in what was kept apart, by the settings and contracts of now"),
    ):
        one = inbox.add_parser(verb, help=help_)
        one.add_argument("id", type=key, metavar="ID", help="as `list` prints it")
        if verb == "redrive":
            one.add_argument("--by", required=True, type=key, metavar="NAME", help="who decides; it is kept")
        add_output(one)
    contract = command("contract", "What events of a type must be like.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    add = contract.add_parser("add", help="keep apart events of a type that do not fit")
    add.add_argument("file", metavar="FILE", help="as `waypost contracts --out` writes it, or a JSON Schema")
    add.add_argument("--type", type=key, metavar="TYPE", help="of events, beside a JSON Schema")
    add.add_argument("--dataschema", type=key, default="", metavar="URI", help="only of those that name it")
    add_output(add)
    remove = contract.add_parser("remove", help="take events of a type as they come")
    remove.add_argument("type", type=key, metavar="TYPE")
    remove.add_argument(
        "--dataschema", type=key, default="", metavar="URI", help="the one of this dataschema"
    )
    add_output(remove)
    add_output(contract.add_parser("list", help="all contracts"), "table")


def add_secret_options(add: argparse.ArgumentParser) -> None:
    add.add_argument(
        "--secret-file",
        metavar="FILE",
        help="use the secret in FILE (- is stdin), given by the other side, instead of a new one",
    )
    add.add_argument(
        "--replace",
        action="store_true",
        help="a name that is registered stands for this from now on; its old secrets are gone",
    )
    add_output(add)


def add_operations(command: Command) -> None:
    start = command("start", "Start an execution and print its id.")
    start.add_argument("flow", metavar="FLOW[@VERSION]")
    start.add_argument("--input", required=True, metavar="JSON", help="JSON, or @FILE, or - for stdin")
    start.add_argument(
        "--key", type=key, metavar="K", help="a business key: at most one execution of the flow has it"
    )
    start.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module with flows (else WAYPOST_FLOWS)",
    )
    start.add_argument(
        "--deadline",
        type=duration,
        metavar="SPAN",
        help="stop and undo it when it takes longer (else its flow's)",
    )
    start.add_argument("--wait", action="store_true", help="return when it has finished or is held")
    start.add_argument("--timeout", type=duration, metavar="SPAN", help="of --wait (default: 5m)")
    add_output(start)

    show = command("show", "Show an execution: where it stands, its journal, its messages and their tries.")
    show.add_argument("id", type=execution, metavar="ID")
    add_output(show)

    why = command("why", "Say in a sentence what an execution waits for, and what a person can do.")
    why.add_argument("id", type=execution, metavar="ID")
    add_output(why)

    trace = command("trace", "Draw what an execution did and when: its steps, commands, tries and waits.")
    trace.add_argument("id", type=execution, metavar="ID")
    add_output(trace)

    listing = command("list", "List executions, the newest first.")
    listing.add_argument("--status", choices=[*STATES])
    listing.add_argument("--flow", type=key, metavar="FLOW")
    listing.add_argument("--key", type=key, metavar="K", help="a business key")
    listing.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="about what it has published, such as stage=paid or 'amount>=100'; several have to hold all",
    )
    listing.add_argument("--parent", type=execution, metavar="ID", help="the children of this execution")
    listing.add_argument("--limit", type=count, default=50, metavar="N", help="at most so many (default: 50)")
    add_output(listing, "table", "ids")


def add_tasks(command: Command) -> None:
    task = command("task", "Tries of tasks: what waits in queues, who has it, what became of it.")
    verbs = task.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="tries, the newest first")
    listing.add_argument("--queue", type=key, metavar="QUEUE")
    listing.add_argument("--state", choices=TASK_STATES)
    listing.add_argument("--limit", type=count, default=50, metavar="N", help="at most so many (default: 50)")
    add_output(listing, "table")
    show = verbs.add_parser("show", help="one try")
    show.add_argument("id", type=task_id, metavar="ID", help="as `task list` prints it")
    add_output(show)


def add_orders(command: Command) -> None:
    """What a person decides about executions."""
    resume = command("resume", "Let a held execution go on where it stopped.")
    resume.add_argument("id", type=execution, metavar="ID")
    add_operator(resume)

    cancel = command("cancel", "Ask an execution to end: it undoes what it did, and nothing new begins.")
    cancel.add_argument("id", type=execution, metavar="ID")
    cancel.add_argument("--no-undo", action="store_true", help="what was done stands, and is listed")
    add_operator(cancel)

    approvals = command("approvals", "List what flows wait for people to decide, the longest first.")
    approvals.add_argument("--flow", type=key, metavar="FLOW")
    approvals.add_argument(
        "--limit", type=count, default=50, metavar="N", help="at most so many (default: 50)"
    )
    add_output(approvals, "table")

    decide = command("decide", "Decide about an approval that an execution waits for.")
    decide.add_argument("id", type=execution, metavar="ID")
    decide.add_argument("subject", type=key, metavar="SUBJECT", help="as `approvals` prints it; or its path")
    decide.add_argument("choice", type=key, metavar="CHOICE", help="one of those that are offered")
    decide.add_argument(
        "--by", required=True, type=key, metavar="NAME", help="who decides; the journal keeps it"
    )
    decide.add_argument("--reason", default="", metavar="TEXT", help="why; the journal keeps it")
    add_output(decide)

    terminate = command(
        "terminate", "End an execution at once: nothing more is undone, and what stands is listed."
    )
    terminate.add_argument("id", type=execution, metavar="ID")
    add_operator(terminate)

    resolve = command("resolve", "Decide about a step or an undo that holds its execution.")
    resolve.add_argument("id", type=execution, metavar="ID")
    resolve.add_argument("path", metavar="PATH", help="as `show` prints it, such as charge/undo")
    resolve.add_argument("verdict", choices=("retry", "done", "skip", "not_done"))
    resolve.add_argument("--value", metavar="JSON", help="with done: what the step returned")
    add_operator(resolve)


def moment(text: str) -> datetime:
    """A time, or how long ago it was."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None:
        try:
            return datetime.now(UTC) - span(text)
        except (ValueError, OverflowError):
            expected = "expected a time such as 2026-11-30T12:00Z, or a span such as 2h: that long ago"
            raise argparse.ArgumentTypeError(f"{expected}; found {shown(text)}") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def per_second(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 100_000:
        raise argparse.ArgumentTypeError(
            f"expected more than 0 and at most 100000 a second, found {shown(text)}"
        )
    return found


def add_messages(command: Command) -> None:
    """What leaves, what was tried, what never arrived."""
    outbox = command("outbox", "Messages that leave.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    listing = outbox.add_parser("list", help="those that have not arrived, the oldest first")
    listing.add_argument("--state", action="append", default=[], metavar="STATE", help="may be repeated")
    listing.add_argument("--lane", metavar="LANE")
    add_filter(listing)
    one = outbox.add_parser("show", help="one: why it is where it is, its tries, its body")
    one.add_argument("id", type=message, metavar="MESSAGE")
    add_output(one)

    delivery = command("delivery", "Tries to send messages.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    tries = delivery.add_parser("list", help="those of a message, the newest first")
    tries.add_argument("id", type=message, metavar="MESSAGE")
    add_output(tries, "table")
    one = delivery.add_parser("show", help="one of them: what was answered, with its headers")
    one.add_argument("id", type=message, metavar="MESSAGE")
    one.add_argument("--try", dest="number", type=count, metavar="N", help="its number (default: the last)")
    add_output(one)
    again = delivery.add_parser("replay", help="send events once more that have arrived")
    again.add_argument("ids", nargs="+", type=message, metavar="MESSAGE")
    again.add_argument("--as-new", action="store_true", help="as others, which name the old ones as cause")
    add_output(again)
    by_hand = delivery.add_parser("curl", help="a script that sends it once more; the secret is not in it")
    by_hand.add_argument("id", type=message, metavar="MESSAGE")

    dlq = command("dlq", "Dead letters: messages that have no try left.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    listing = dlq.add_parser("list", help="all of them, the oldest first")
    listing.add_argument("--code", metavar="CODE", help="why, such as http-503 or timeout")
    add_filter(listing)
    one = dlq.add_parser("show", help="one: why, its tries, its body")
    one.add_argument("id", type=message, metavar="MESSAGE")
    add_output(one)
    again = dlq.add_parser("replay", help="put events back, in their order; twice does no harm")
    again.add_argument("ids", nargs="*", type=message, metavar="MESSAGE")
    again.add_argument("--all", action="store_true", help="of every endpoint")
    again.add_argument("--code", metavar="CODE", help="why, such as http-503 or timeout")
    again.add_argument("--dry-run", action="store_true", help="only say which")
    again.add_argument("--rate", type=per_second, metavar="N", help="so many a second")
    again.add_argument(
        "--as-new", action="store_true", help="as other messages, which name the old ones as cause"
    )
    add_filter(again)
    away = dlq.add_parser("discard", help="decide that they need not arrive; what waits behind them goes on")
    away.add_argument("ids", nargs="+", type=message, metavar="MESSAGE")
    add_output(away)


def add_filter(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--endpoint", type=key, metavar="ENDPOINT")
    verb.add_argument("--type", type=key, metavar="TYPE", help="of the event")
    verb.add_argument(
        "--since", type=moment, metavar="WHEN", help="a time, or a span such as 2h: that long ago"
    )
    verb.add_argument("--until", type=moment, metavar="WHEN", help="before that")
    verb.add_argument("--after", type=message, metavar="MESSAGE", help="go on behind it")
    verb.add_argument("--limit", type=count, default=100, metavar="N", help="at most so many (default: 100)")
    add_output(verb, "table")


def add_contracts(command: Command) -> None:
    contracts = command("contracts", "Print the contract classes of modules as JSON Schema.")
    contracts.add_argument("modules", nargs="+", metavar="MODULE", help="with classes of commands and events")
    contracts.add_argument(
        "--out", metavar="DIR", help="write one file per type there, remove those of others"
    )
    contracts.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when --out would change anything"
    )


def add_versions(command: Command) -> None:
    flow = command("flow", "Versions of flows: what is open of each, and what each gets of what is started.")
    verbs = flow.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="all versions, in the order in which they became known")
    listing.add_argument("--flow", type=key, metavar="FLOW", help="of this flow only")
    add_output(listing, "table")
    share = verbs.add_parser("share", help="begin so many of a hundred new executions with a version")
    share.add_argument("version", metavar="FLOW@VERSION", help="it may become known later")
    share.add_argument("percent", type=percent, metavar="PERCENT", help="0 to 100")
    add_output(share)
    unshare = verbs.add_parser("unshare", help="a version has no share of its own any more")
    unshare.add_argument("version", metavar="FLOW@VERSION")
    add_output(unshare)

    sealed = command("payloads", "Data at rest, and the keys that it is sealed with.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    sealed.add_parser("rekey", help="seal all that is in the database with the newest key")
    sweep = sealed.add_parser("sweep", help="remove objects of the payload store that nothing names")
    sweep.add_argument(
        "--older", type=duration, default="168h", help="than this only (default: 168h, at least 24h)"
    )
    sweep.add_argument("--dry-run", action="store_true", help="only say how many")

    check = command(
        "check-replay", "Replay every open journal against the code of modules; nothing is written."
    )
    check.add_argument("modules", nargs="*", metavar="MODULE", help="with flows (else WAYPOST_FLOWS)")
    check.add_argument(
        "--under", metavar="FLOW@VERSION", help="all that is open of this flow against this version of it"
    )
    add_output(check)


def address(text: str) -> Address:
    try:
        return address_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_simulators(command: Command) -> None:
    """Others, for tests of one's own."""
    verbs = command("simulate", "Others, for your own tests: see docs/testing.md.").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    endpoint = verbs.add_parser("endpoint", help="serve an endpoint whose paths say how it misbehaves")
    endpoint.add_argument(
        "--addr",
        type=address,
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where it listens; port 0: any that is free (default: 127.0.0.1:0)",
    )
    either = endpoint.add_mutually_exclusive_group()
    either.add_argument(
        "--behaviour",
        action="append",
        default=[],
        metavar="BEHAVIOUR",
        help="whatever the path; may be repeated: one after the other, the last one goes on",
    )
    either.add_argument("--script", metavar="FILE", help="JSON: paths, and lists of behaviours in turn")
    endpoint.add_argument(
        "--secret-env",
        action="append",
        default=[],
        metavar="VARIABLE",
        help="of the environment: it has the secret that requests are signed with; may be repeated",
    )
    endpoint.add_argument("--list", action="store_true", help="only say which behaviours there are")
    add_output(endpoint, "table")
    provider = verbs.add_parser(
        "provider", help="post webhooks as a provider does, and come again as it does"
    )
    provider.add_argument("name", choices=[*PROVIDERS], metavar="NAME", help=", ".join(PROVIDERS))
    provider.add_argument("--to", required=True, metavar="URL", help="where they are posted")
    for option, help_ in (
        ("--secret-env", "of the environment: it has the secret that signs"),
        ("--rotate", "it has another secret, to which the provider changes in the middle"),
    ):
        provider.add_argument(option, required=option == "--secret-env", metavar="VARIABLE", help=help_)
    for option, default, help_ in (
        ("--count", 1, "so many events (default: 1)"),
        ("--skew", 0, "its clock is so many seconds ahead; a minus: behind"),
        ("--seed", None, "the same number makes the same events (default: drawn, and told)"),
    ):
        provider.add_argument(option, type=whole, default=default, metavar="N", help=help_)
    for option, default, help_ in (
        ("--rate", 100.0, "events a second (default: 100)"),
        ("--duplicates", 0.0, "the part of them that comes twice, 0 to 1"),
        ("--speed", 1.0, "it comes again so much faster than it really would (default: 1)"),
    ):
        provider.add_argument(option, type=number, default=default, metavar="N", help=help_)
    provider.add_argument("--reorder", action="store_true", help="in another order than they happened in")
    provider.add_argument("--type", default="", metavar="TYPE", help="of the events, as the provider says it")
    provider.add_argument(
        "--body", metavar="FILE", help="a template of their bodies: ${id}, ${number}, ${type}, …"
    )
    provider.add_argument("--settings", metavar="JSON", help=f"of a scheme of one's own; {SETTINGS}")
    provider.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST",
        help="one that may be posted to though it is neither here nor in a private network; may be repeated",
    )
    add_output(provider)


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shown(text)}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {shown(text)}") from None


TASK_STATES = (*("due", "running", "stopping", "done", "refused", "failed", "lost", "expired", "withdrawn"),)
STATES = ("ready", "running", "waiting", *(str(status) for status in Status))


def add_operator(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--by", required=True, type=key, metavar="NAME", help="who decides; the journal keeps it"
    )
    verb.add_argument("--reason", required=True, metavar="TEXT", help="why; the journal keeps it")
    add_output(verb)


def add_output(verb: argparse.ArgumentParser, *more: str) -> None:
    shapes = (more[0] if more else "text", "json", *more[1:])
    verb.add_argument("-o", "--output", choices=shapes, default=shapes[0], help=f"default: {shapes[0]}")
