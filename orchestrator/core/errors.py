"""What a flow may catch, and what stops it.

Exception
└── FlowError               what an author may expect and catch
    ├── StepError           .path .name .code .detail .data .may_have_acted
    │   ├── StepRefused     definitely not done: its undo is dropped                 may_have_acted = False
    │   ├── StepFailed      it raised, and the tries ran out: its undo stays                         True
    │   ├── OutcomeUnknown  sent, no answer: its undo stays                                          True
    │   ├── ReplyInvalid    done, but the answer fails its model: its undo stays                     True
    │   └── ChildFailed     the child ended in another way than well: its undo is dropped            False
    ├── TimedOut            a wait or a `within` ran out: nothing happened that is not undone
    ├── AllFailed           every branch of `any` failed                                      .errors
    └── UsageError          the context was asked something that cannot be
BaseException
├── Cancelled               thrown at an await of what is to end; `except Exception` lets it pass
└── Halt                    stops the turn and holds the execution; never caught by the program
    ├── NonDeterminism      the program and its journal disagree
    ├── LimitExceeded       a documented limit was reached
    └── ProgramFault        a bug: only a new deploy can mend it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from contracts.sensitive import without_inputs

Json = Any


class FlowError(Exception):
    """What an author of flows may expect and catch."""


class StepError(FlowError):
    """A call or a step did not end well. `may_have_acted` says whether its effect may exist."""

    may_have_acted: ClassVar[bool] = True
    failure_class: ClassVar[str] = "permanent"

    def __init__(self, path: str, name: str, error: dict[str, Json]) -> None:
        self.path = path
        self.name = name
        self.code = str(error.get("code") or "error")
        self.detail = str(error.get("detail") or "")
        self.data: Json = error.get("data")
        super().__init__(f"{name} at {path}: {self.code}" + (f": {self.detail}" if self.detail else ""))


class StepRefused(StepError):
    """Definitely not done. Its undo is dropped."""

    may_have_acted = False
    failure_class = "business"


class StepFailed(StepError):
    """It raised, and the tries ran out. It may have acted, so its undo stays."""


class OutcomeUnknown(StepError):
    """It was sent or begun, and no answer came in time. Its undo stays."""

    failure_class = "unknown"


class ReplyInvalid(StepError):
    """It was done, and the answer does not fit its model. Its undo stays."""


class ChildFailed(StepError):
    """A child ended in another way than well; `status` says how: failed, compensated, cancelled or terminated.

    `error` is its failure as data, empty when it was cancelled; code and detail are those of it. What a child did is
    undone by itself, or listed at its end: the undo that its parent has for it is dropped.
    """

    may_have_acted = False

    def __init__(self, path: str, name: str, error: dict[str, Json]) -> None:
        super().__init__(path, name, error)
        self.status = str(error.get("status") or "failed")
        self.error: dict[str, Json] = error.get("error") or {}
        said = f"{self.code}: {self.detail}" if self.detail else self.code
        self.args = (f"{name} at {path}: {self.status}" + ("" if said == self.status else f": {said}"),)


class TimedOut(FlowError):
    """A wait, or a `within`, ran out. What was under way in it was withdrawn and, with an undo, undone."""


class AllFailed(FlowError):
    """No branch of an `any` succeeded. `errors` has what each of them raised, in the order of their ends."""

    def __init__(self, errors: Sequence[BaseException]) -> None:
        super().__init__("; ".join(in_words(error) for error in errors))
        self.errors = list(errors)


class UsageError(FlowError):
    """The context was asked something that cannot be; nothing was written."""


class Cancelled(BaseException):
    """Thrown at an await of a branch that is to end, at most once, so that `finally` blocks may await.

    A flow that catches it and returns has simply ended.
    """


class Continue(BaseException):
    """The flow goes on as new, with `input`; never meant to be caught."""

    def __init__(self, input: Any) -> None:  # noqa: A002  # an execution's input, everywhere
        super().__init__("continue as new")
        self.input = input


class Halt(BaseException):
    """Stops the turn: the execution is held, nothing is lost, a person decides."""

    code: ClassVar[str] = "halted"


class NonDeterminism(Halt):
    """The program asks for something else than its journal recorded. Both sides are named."""

    code = "nondeterminism"


class LimitExceeded(Halt):
    """A limit of the core was reached; the message names it and its value."""

    code = "limit"


class ProgramFault(Halt):
    """The program has a bug. After a deploy that mends it, the execution resumes at the same fact."""

    code = "program-fault"


class Overdue(Exception):  # it is what an end says, and nobody raises it
    """How an execution ends that its deadline has stopped."""


class InputInvalid(Halt):
    """The recorded input does not fit the model of the flow."""

    code = "input-invalid"


FAULTS: Final[tuple[type[Exception], ...]] = (
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
"""Exceptions that only a new deploy can mend: they pass every scope without undoing, and hold."""

MISUSES: Final = ("event loop", "already awaited", "being awaited already")
"""What a RuntimeError says that comes of a program's own mistake."""

UNSTORABLE: Final = "unstorable"
"""The code of a `held` fact after a turn that the database refused."""

PAYLOAD_UNAVAILABLE: Final = "payload-unavailable"
"""The code of a `held` fact after a large payload that the payload store did not give."""

STOPPING: Final = frozenset(
    {
        *(NonDeterminism.code, LimitExceeded.code, ProgramFault.code, InputInvalid.code),
        *(UNSTORABLE, PAYLOAD_UNAVAILABLE),
    }
)
"""Codes of `held` facts after which only an order to resume lets the program go on where it stopped."""

ENDINGS: Final[dict[str, Callable[[str, str, dict[str, Json]], FlowError]]] = {
    "refused": StepRefused,
    "failed": StepFailed,
    "unknown": OutcomeUnknown,
    "child_failed": ChildFailed,
    "timed_out": lambda path, name, _: TimedOut(f"{name} at {path}: nothing came in time"),
}
"""The error that each outcome of an ask but `done` raises in the program, from its path, name and error."""

MESSAGE_OUTCOMES: Final = frozenset({"done", "refused", "failed", "unknown"})
"""What can become of a message or a step; only a wait can be `timed_out`."""

NOT_THE_AUTHORS: Final = frozenset({"orchestrator", *sys.stdlib_module_names})
"""Packages whose lines say nothing about a flow: ours, and Python's own."""

DETAIL_MAX: Final = 2_000
"""Characters of an error's text that a journal keeps."""

CODE_MAX: Final = 128
"""Characters of an error's own code that a journal keeps."""


def is_fault(error: BaseException) -> bool:
    """Whether only a new deploy can mend `error`: also a library that needs a loop, or a coroutine awaited twice."""
    return isinstance(error, FAULTS) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in MISUSES)
    )


def storable(text: str) -> str:
    """`text` as a journal can hold it: no NUL, no lone surrogate, at most DETAIL_MAX characters."""
    clean = text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return clean if len(clean) <= DETAIL_MAX else clean[: DETAIL_MAX - 1] + "…"


def words_of(error: BaseException) -> str:
    """What `error` says, as a journal can hold it; empty where its own words are broken."""
    try:
        return storable(without_inputs(str(error)))
    except Exception:  # noqa: BLE001  # of somebody else's __str__
        return ""


def in_words(error: BaseException) -> str:
    """Type and words of `error`."""
    return f"{type(error).__name__}: {words_of(error)}".removesuffix(": ")


def code_of(error: BaseException) -> str:
    """The error's own `code`, when that is a word; else `raised`."""
    try:
        code: object = getattr(error, "code", None)
    except Exception:  # noqa: BLE001  # of somebody else's property
        return "raised"
    return storable(code)[:CODE_MAX] if isinstance(code, str) and code else "raised"


def place_of(error: BaseException) -> str:
    """Where the author's own code raised `error`, or asked for what did: function, module and line."""
    place, trace = "", error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", "?"))
        if module.partition(".")[0] not in NOT_THE_AUTHORS:
            place = f"{trace.tb_frame.f_code.co_qualname} ({module}:{trace.tb_lineno})"
        trace = trace.tb_next
    return storable(place)


def in_full(error: BaseException) -> str:
    """Type, words and place of `error`."""
    place = place_of(error)
    return f"{in_words(error)} at {place}" if place else in_words(error)


def structure(error: BaseException) -> dict[str, Json]:
    """A failure as data: class, code, detail, and where it happened."""
    if isinstance(error, StepError):
        kept: dict[str, Json] = {
            "class": error.failure_class,
            "type": type(error).__name__,
            "code": storable(error.code),
            "detail": storable(error.detail),
            "path": storable(str(error.path)),
        }
        if isinstance(error, ChildFailed):
            kept["status"] = error.status
        return kept | ({"data": error.data} if error.data is not None else {})
    if isinstance(error, Overdue):
        said = {"code": "deadline", "detail": storable(str(error))}
        return {"class": "transient", "type": "Overdue", **said}
    late = isinstance(error, TimedOut)
    return {
        "class": "transient" if late else "permanent",
        "type": type(error).__name__,
        "code": "timed-out" if late else "raised",
        "detail": in_words(error),
        "at": place_of(error),
    }


def error_in(data: dict[str, Json]) -> dict[str, Json]:
    """The error that an outcome carries; empty when it has none."""
    error: dict[str, Json] | None = data.get("error")
    return error or {}


def reason_of(data: dict[str, Json]) -> str:
    """An outcome in words: `unknown: timeout no answer until its due time`."""
    error = error_in(data)
    words = f"{data['outcome']}: {error.get('code') or 'error'} {error.get('detail') or ''}"
    return storable(words.strip())
