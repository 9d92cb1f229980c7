"""The command `waypost`: what people and scripts start, ask and decide with.

Errors are one line that names the thing, what was expected and what was found; never a traceback, unless
WAYPOST_DEBUG is set.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psycopg

from contracts.errors import Conflict, ContractViolation, NotFound, WaypostError, shown
from migrations.runner import MigrationError
from orchestrator.cli import approvals, demo, dev, inbox, operations, outbox, register, roles, schemas
from orchestrator.cli.arguments import parser
from orchestrator.cli.flows import flow
from orchestrator.cli.mutexes import mutex
from orchestrator.cli.output import Exit, note, plain
from orchestrator.cli.payloads import payloads
from orchestrator.cli.replays import check_replay
from orchestrator.cli.simulate import simulate
from orchestrator.cli.subscriptions import subscription
from orchestrator.cli.tasks import task
from orchestrator.cli.trace import trace
from orchestrator.cli.why import why
from orchestrator.settings import Settings
from receiver.loop import open_standard_files

COMMANDS: Final[Mapping[str, Callable[[Any, Settings], int]]] = {
    "migrate": roles.migrate,
    "worker": roles.worker,
    "relay": roles.relay,
    "tasks": roles.tasks,
    "task": task,
    "receiver": roles.receiver,
    "endpoint": register.endpoint,
    "sender": register.sender,
    "subscription": subscription,
    "mutex": mutex,
    "inbox": inbox.inbox,
    "contract": inbox.contract,
    "outbox": outbox.outbox,
    "delivery": outbox.delivery,
    "dlq": outbox.dlq,
    "start": operations.start,
    "show": operations.show,
    "why": why,
    "trace": trace,
    "list": operations.list_executions,
    "resume": operations.resume,
    "cancel": operations.cancel,
    "terminate": operations.terminate,
    "resolve": operations.resolve,
    "approvals": approvals.approvals,
    "decide": approvals.decide,
    "contracts": schemas.contracts,
    "flow": flow,
    "check-replay": check_replay,
    "payloads": payloads,
    "simulate": simulate,
    "demo": demo.run,
    "dev": dev.run,
}

PARTS: Final = frozenset({"worker", "relay", "receiver", "tasks"})
"""Commands that have nothing to say on stdout."""

NOT_THERE: Final = frozenset({"42P01", "42883", "42703", "42809", "3F000"})
"""A table, a function, a column (also one whose name is a function's) or a schema that the database does not have."""


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Run one command; the process's exit code."""
    open_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType]  # only real files have it
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser().print_help(sys.stderr)
        return Exit.USAGE
    args = parser().parse_args(argv)
    stdout: object = sys.stdout  # None when it was closed
    if stdout is None and args.command not in PARTS:
        note("waypost: stdout: expected an open file, for what this command says")
        return Exit.ERROR
    environment = os.environ if environment is None else environment
    try:
        return COMMANDS[args.command](args, Settings.from_environment(environment))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.ERROR
    except Exception as error:  # noqa: BLE001  # a person sees one line, whatever it was
        if environment.get("WAYPOST_DEBUG"):
            traceback.print_exc()
        note(f"waypost: {told(error)}{way_out(error, environment)}")
        return code_of(error)


def way_out(error: Exception, environment: Mapping[str, str]) -> str:
    """What to do about a database that is away, where the environment is that of a `dev` or `demo`."""
    folder = environment.get("WAYPOST_DEV")
    if folder is None or not isinstance(error, psycopg.OperationalError) or error.sqlstate:
        return ""
    return f"; it is that of `waypost dev` in {plain(folder)}: start it again, then `. {plain(folder)}/environment`"


def code_of(error: Exception) -> Exit:
    match error:
        case NotFound():
            return Exit.NOT_FOUND
        case Conflict():
            return Exit.REFUSED
        case ContractViolation() | UnicodeEncodeError():
            return Exit.USAGE
        case _:
            return Exit.ERROR


def told(error: Exception) -> str:
    """The error in one line."""
    text = plain(" ".join(str(error).split()))
    match error:
        case WaypostError() | MigrationError():
            return text
        case psycopg.Error() if error.sqlstate in NOT_THERE:
            return f"database: {text}; expected Waypost's tables: run `waypost migrate`"
        case psycopg.Error():
            return f"database: {text or type(error).__name__}"
        case UnicodeEncodeError():  # what no terminal types: bytes of an argument that are no UTF-8
            return f"expected text in UTF-8, found {shown(error.object)}"
        case OSError():
            return text
        case _:
            return f"bug: {type(error).__name__}: {text} (WAYPOST_DEBUG=1 shows where)"
