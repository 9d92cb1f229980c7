"""The behaviours that a URL or a script may name: what each does, and what it may be told."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qsl

from contracts import strict_json
from contracts.envelope import STRUCTURED
from contracts.errors import ContractViolation, MalformedJson, shown
from contracts.signature import Verifier
from orchestrator.simulators import behaviours
from orchestrator.simulators.behaviours import Step, then
from orchestrator.simulators.reply import id_of, reply_to
from orchestrator.simulators.server import Exchange, Request

FAILS_MAX: Final = 1_000
"""Tries of a message that `flaky` fails."""
MESSAGES_MAX: Final = 10_000
"""Messages whose tries `flaky` counts; the one that it has not seen for longest is forgotten."""
ID_CHARACTERS_MAX: Final = 128
"""Of a message's id, where tries are counted."""
OPTIONS_MAX: Final = 8
"""Of one behaviour."""
SCRIPT_BYTES_MAX: Final = 64 * 1024
SCRIPT_STEPS_MAX: Final = 1_000
"""Of one path."""
ANY: Final = "*"
"""The path of a script for all others."""


class BehaviourInvalid(ContractViolation):
    """A behaviour, or a script of some, that nobody understands."""

    code = "behaviour-invalid"
    http_status = 404


class Option(NamedTuple):
    """What a behaviour may be told: a pattern, what it is called when something else is found, and what holds else."""

    pattern: str
    expected: str
    default: str

    def read(self, what: str, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise BehaviourInvalid(f"{what}: expected {self.expected}, found {shown(text)}")
        return text


def status(default: int) -> Option:
    return Option(r"[2-9][0-9]{2}", "a status from 200 to 999", str(default))


RETRY_AFTER: Final = Option(r"[!-~ ]{1,64}", "at most 64 visible characters", "")
COUNT: Final = Option(r"[0-9]{1,3}|1000", f"0 to {FAILS_MAX}", "3")
VALUE: Final = Option(r"[ -~]{0,1024}", "JSON of at most 1024 visible characters", "")
END: Final = Option("done|refused|failed", "done, refused or failed", "done")
CODE: Final = Option(
    r"[a-z0-9_-]{1,64}", "a code of at most 64 small letters, digits and hyphens", "simulated"
)


Make = Callable[[Mapping[str, str], Sequence[Verifier]], Step]
"""How a behaviour is made of what it is told, and of the secrets that prove who asks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A behaviour: how it is made, what it does, what it may be told. `argument` is what may stand behind a slash."""

    make: Make
    does: str
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    argument: str = ""

    def usage(self, name: str) -> str:
        """How it is written, with what holds when nothing is said."""
        path = f"/{name}/{self.options[self.argument].default}" if self.argument else f"/{name}"
        others = {option: it for option, it in self.options.items() if option != self.argument}
        query = "&".join(f"{option}={it.default or '…'}" for option, it in others.items())
        return f"{path}?{query}" if query else path


def answer(told: Mapping[str, str], *fields: str, body: bytes = b"") -> Step:
    """The status that it is told, and Retry-After."""
    after = [f"Retry-After: {told['retry_after']}"] if told.get("retry_after") else []
    return then(int(told["status"]), *after, *fields, body=body)


def always(step: Step) -> Make:
    return lambda _told, _secrets: step


def redirect(told: Mapping[str, str], _secrets: Sequence[Verifier]) -> Step:
    async def step(exchange: Exchange, request: Request) -> None:
        await answer(told, f"Location: {exchange.server.url}/ok")(exchange, request)

    return step


def flaky(told: Mapping[str, str], _secrets: Sequence[Verifier]) -> Step:
    """Counts by the message's id, so that messages do not take each other's failures."""
    tries: OrderedDict[str, int] = OrderedDict()
    fail, well = answer(told), then(200)

    async def step(exchange: Exchange, request: Request) -> None:
        name = id_of(request)[:ID_CHARACTERS_MAX]
        tries[name] = tries.pop(name, 0) + 1
        if len(tries) > MESSAGES_MAX:
            tries.popitem(last=False)
        await (fail if tries[name] <= int(told["fail"]) else well)(exchange, request)

    return step


def reply(told: Mapping[str, str], secrets: Sequence[Verifier]) -> Step:
    try:
        value = strict_json.decode(told["value"] or "null", what="reply: value")
    except MalformedJson as error:
        raise BehaviourInvalid(str(error)) from None

    async def step(exchange: Exchange, request: Request) -> None:
        made = reply_to(request, secrets, end=told["end"], value=value, code=told["code"])
        await exchange.write(made)

    return step


def reply_cut(_told: Mapping[str, str], _secrets: Sequence[Verifier]) -> Step:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {STRUCTURED}\r\nContent-Length: 1000\r\n\r\n"
    return behaviours.breaks_off(head.encode() + b'{"specversion": "1.0", "id": ')


def head_only(text: str) -> Make:
    return always(behaviours.says(text.replace("\n", "\r\n").encode()))


STATUS: Final[Mapping[str, Option]] = {"status": status(200)}

KINDS: Final[Mapping[str, Kind]] = {
    "ok": Kind(always(then(200, body=b"ok")), "200"),
    "status": Kind(
        lambda told, _: answer(told),
        "that status, up to 999",
        {"status": status(503), "retry_after": RETRY_AFTER},
        argument="status",
    ),
    "flaky": Kind(
        flaky,
        "fails each message so often, then 200",
        {"fail": COUNT, "status": status(503)},
    ),
    "redirect": Kind(redirect, "to /ok", {"status": status(307)}),
    "reply": Kind(
        reply,
        "a reply to who signs with the secret",
        {"end": END, "value": VALUE, "code": CODE},
    ),
    "reply-cut": Kind(reply_cut, "200, and closes it inside a reply"),
    "hang": Kind(always(behaviours.hangs), "reads, and never answers"),
    "slow-header": Kind(
        always(behaviours.drips(b"HTTP/1.1 200 OK\r\nX-Slow: ")),
        "a header without an end, a byte a second",
    ),
    "continue": Kind(head_only("HTTP/1.1 100 Continue\n\n" * 3), "100 Continue, and nothing more"),
    "drip": Kind(
        lambda told, _: behaviours.drips(behaviours.endless(int(told["status"]))),
        "a body without an end, a byte a second",
        STATUS,
    ),
    "flood": Kind(
        lambda told, _: behaviours.floods(int(told["status"])),
        "a body without an end, as fast as it is read",
        STATUS,
    ),
    "reset": Kind(always(behaviours.resets), "reads, and resets the connection"),
    "cut": Kind(always(behaviours.cuts), "reads, and closes the connection"),
    "cut-status": Kind(always(behaviours.breaks_off(b"HTTP/1.1 20")), "closes it inside the status line"),
    "cut-body": Kind(
        lambda told, _: behaviours.breaks_off(behaviours.endless(int(told["status"])) + b"broken"),
        "closes it inside the body",
        STATUS,
    ),
    "close-after-answer": Kind(
        always(behaviours.goes_stale(then(200))),
        "200; cuts the kept connection when more comes",
    ),
    "gzip-garbage": Kind(
        lambda told, _: answer(told, "Content-Encoding: gzip", body=b"\x1f\x8b\x00\xff no gzip"),
        "a body that is no gzip though it says so",
        STATUS,
    ),
    "duplicate-length": Kind(
        head_only("HTTP/1.1 200 OK\nContent-Length: 1\nContent-Length: 2\n\n"), "two lengths of one body"
    ),
    "huge-headers": Kind(head_only(f"HTTP/1.1 200 OK\nX: {'y' * 20_000}\n\n"), "a header of 20,000 bytes"),
    "many-headers": Kind(head_only("HTTP/1.1 200 OK\n" + "X: y\n" * 1_000 + "\n"), "1,000 headers"),
    "bad-status": Kind(head_only("HTTP/1.1 banana OK\n\n"), "a status that is no number"),
    "switch-protocols": Kind(
        head_only("HTTP/1.1 101 Switching\nUpgrade: x\nConnection: upgrade\n\n"), "101, for another protocol"
    ),
    "no-http": Kind(head_only("nonsense\n\n"), "what is no HTTP"),
}
"""The behaviours by the name that begins a path."""


Named = tuple[str, Step]
"""A behaviour that is made, and its name."""


def parsed(text: str, secrets: Sequence[Verifier] = ()) -> Named:
    """What `status/503?retry_after=5` means. Raises BehaviourInvalid."""
    path, _, query = text.removeprefix("/").partition("?")
    name, slash, argument = path.partition("/")
    kind = KINDS.get(name)
    if kind is None:
        raise BehaviourInvalid(f"behaviour: expected one of {', '.join(KINDS)}, found {shown(name)}")
    if query.count("&") >= OPTIONS_MAX:
        raise BehaviourInvalid(
            f"{name}: expected at most {OPTIONS_MAX} options, found {query.count('&') + 1}"
        )
    given = dict(parse_qsl(query, keep_blank_values=True))
    if slash:
        given[kind.argument or "/"] = argument
    if foreign := [option for option in given if option not in kind.options]:
        options = ", ".join(kind.options) or "no options"
        raise BehaviourInvalid(f"{name}: expected {options}, found {shown(foreign[0])}")
    defaults = {option: it.default for option, it in kind.options.items()}
    read = {option: kind.options[option].read(f"{name}: {option}", value) for option, value in given.items()}
    return name, kind.make(defaults | read, secrets)


def scripted(text: str | bytes) -> dict[str, list[str]]:
    """Reads a script: JSON, whose members are paths (`*` for any other) and lists of behaviours in turn. Raises
    BehaviourInvalid.
    """
    if len(text) > SCRIPT_BYTES_MAX:
        raise BehaviourInvalid(f"script: expected at most {SCRIPT_BYTES_MAX} bytes, found {len(text)}")
    try:
        found = strict_json.decode(text.encode() if isinstance(text, str) else text, what="script")
    except MalformedJson as error:
        raise BehaviourInvalid(str(error)) from None
    return checked(found)


def checked(script: object) -> dict[str, list[str]]:
    """The script, when it is one. Raises BehaviourInvalid, which names the path and the behaviour."""
    if not isinstance(script, Mapping):
        raise BehaviourInvalid('script: expected an object such as {"/hook": ["reset", "ok"]}')
    made: dict[str, list[str]] = {}
    for path, found in cast("Mapping[Any, Any]", script).items():
        if path != ANY and not str(path).startswith("/"):
            raise BehaviourInvalid(f"script: expected a path such as /hook, or {ANY}, found {shown(path)}")
        steps: Any = found
        if not isinstance(steps, list | tuple) or not 1 <= len(cast("list[Any]", steps)) <= SCRIPT_STEPS_MAX:
            raise BehaviourInvalid(
                f"script: {shown(path)}: expected a list of 1 to {SCRIPT_STEPS_MAX} behaviours"
            )
        made[str(path)] = [str(step) for step in cast("list[Any]", steps)]
        for step in made[str(path)]:
            parsed(step)
    return made
