"""What can go wrong, as a tree; a leaf carries the facts that its message tells.

    WaypostError
    ├── ContractViolation     the one who asked did not keep to the contract: repeating does not help
    │   ├── MalformedJson
    │   ├── NotEncodable
    │   ├── TooLarge
    │   ├── MalformedEvent
    │   ├── BadSignature
    │   ├── NotAllowed
    │   ├── BadSecret
    │   └── InputInvalid
    ├── NotFound
    │   ├── UnknownFlow
    │   └── UnknownExecution
    ├── Conflict              what is asked contradicts what is there
    │   └── KeyConflict
    ├── LimitExceeded
    ├── Unavailable           ask again later
    ├── UnsafeDatabase        a setting would break a promise
    └── VaultError            a secret cannot be opened

`code` is for programs and never changes; `http_status` tells an edge what to answer without knowing why.
Text that strangers wrote is shown by `shown`: escaped, short, in one line.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal
from uuid import UUID

from contracts.limits import PROBLEMS_MAX, SHOWN_CHARACTERS_MAX


def shown(value: object) -> str:
    """`value` for an error text: its repr in ASCII without control characters, cut to a bounded length."""
    if isinstance(value, str | bytes):
        return cut(ascii(value[: SHOWN_CHARACTERS_MAX + 1]), of=len(value))
    try:
        return cut(ascii(value))
    except Exception:  # noqa: BLE001  # a foreign __repr__ may raise anything
        return f"<{type(value).__name__}>"


def cut(text: str, *, of: int = 0) -> str:
    if max(len(text) - 2, of) <= SHOWN_CHARACTERS_MAX:
        return text
    return text[:SHOWN_CHARACTERS_MAX] + "…"


class WaypostError(Exception):
    """The root of all errors that Waypost raises on purpose."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500


class ContractViolation(WaypostError):
    """The one who asked did not keep to the contract; asking again in the same way does not help."""

    code = "contract-violation"
    http_status = 400


class MalformedJson(ContractViolation):
    """A text is not the strict JSON that is read here.

    `place` is a JSON pointer, or a line and column where the text is no JSON at all.
    """

    code = "malformed-json"

    def __init__(self, what: str, place: str, found: str) -> None:
        super().__init__(f"{what}: expected strict JSON, found {found} at {place}")
        self.what = what
        self.place = place
        self.found = found


class NotEncodable(ContractViolation):
    """A value has no form in strict JSON; `place` is the JSON pointer of the part that has none."""

    code = "not-encodable"
    http_status = 422

    def __init__(self, what: str, place: str, found: str) -> None:
        super().__init__(f"{what}: expected a JSON value, found {found} at {place}")
        self.what = what
        self.place = place
        self.found = found


class TooLarge(ContractViolation):
    """A text is larger, in bytes of UTF-8, than its limit."""

    code = "too-large"
    http_status = 413

    def __init__(self, what: str, size: int, limit: int, *, way: str = "") -> None:
        super().__init__(f"{what}: expected at most {limit} bytes, found {size}{way and '; '}{way}")
        self.what = what
        self.size = size
        self.limit = limit


class MalformedEvent(ContractViolation):
    """Something is no CloudEvent 1.0; each problem names an attribute, what is expected, what was found."""

    code = "malformed-event"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("not a CloudEvent 1.0: " + "; ".join(problems[:PROBLEMS_MAX]))
        self.problems = tuple(problems)


class BadSignature(ContractViolation):
    """A request does not prove that one of our senders made it now."""

    code = "bad-signature"
    http_status = 401
    Reason = Literal["missing", "malformed", "stale", "ahead", "mismatch"]

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"not authentic: {reason}")
        self.reason: BadSignature.Reason = reason


class NotAllowed(ContractViolation):
    """Somebody whom we know asks for what is not theirs."""

    code = "not-allowed"
    http_status = 403


class BadSecret(ContractViolation):
    """A text is no signing secret. The message never repeats the text."""

    code = "bad-secret"
    http_status = 422


class InputInvalid(ContractViolation):
    """The input of a flow does not fit its model."""

    code = "input-invalid"
    http_status = 422

    def __init__(self, flow: str, problems: Sequence[str]) -> None:
        super().__init__(f"input of flow {shown(flow)}: " + "; ".join(problems[:PROBLEMS_MAX]))
        self.flow = flow
        self.problems = tuple(problems)


class NotFound(WaypostError):
    code = "not-found"
    http_status = 404


class UnknownFlow(NotFound):
    code = "unknown-flow"

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"no flow is named {shown(name)}; known: {', '.join(sorted(known)[:PROBLEMS_MAX]) or 'none'}"
        )
        self.name = name
        self.known = tuple(known)


class UnknownExecution(NotFound):
    code = "unknown-execution"

    def __init__(self, execution_id: UUID | str) -> None:
        super().__init__(f"no execution is named {shown(str(execution_id))}")
        self.execution_id = execution_id


class Conflict(WaypostError):
    code = "conflict"
    http_status = 409


class KeyConflict(Conflict):
    """A business key is taken by an execution with another input."""

    code = "key-conflict"

    def __init__(self, flow: str, key: str, execution_id: UUID) -> None:
        super().__init__(
            f"key {shown(key)} of flow {shown(flow)} is taken by {execution_id}, which got another input"
        )
        self.flow = flow
        self.key = key
        self.execution_id = execution_id


class LimitExceeded(WaypostError):
    code = "limit-exceeded"
    http_status = 422

    def __init__(self, what: str, found: int, limit: int) -> None:
        super().__init__(f"{what}: expected at most {limit}, found {found}")
        self.what = what
        self.found = found
        self.limit = limit


class Unavailable(WaypostError):
    """Nothing was done, or nobody knows; the same may be asked again after `retry_after` seconds."""

    code = "unavailable"
    http_status = 503

    def __init__(self, what: str, *, retry_after: int = 1) -> None:
        super().__init__(f"{what} is not available; ask again in {retry_after} s")
        self.what = what
        self.retry_after = retry_after


class UnsafeDatabase(WaypostError):
    """The database is set up so that a committed fact could be lost or torn."""

    code = "unsafe-database"

    def __init__(self, setting: str, expected: str, found: str) -> None:
        super().__init__(f"database setting {setting}: expected {expected}, found {shown(found)}")
        self.setting = setting
        self.expected = expected
        self.found = found


class VaultError(WaypostError):
    """A secret cannot be opened: another key sealed it, or its row was changed. Names only the owner."""

    code = "vault"

    def __init__(self, owner: str) -> None:
        super().__init__(f"the secret of {shown(owner)} cannot be opened with this key")
        self.owner = owner
