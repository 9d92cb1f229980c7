"""What an answer means for the message that it answers: the table of docs/delivering.md, as data in and data out."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import ClassVar, Final
from uuid import UUID

from contracts.backoff import COMMAND_SCHEDULE, EVENT_SCHEDULE, Schedule
from contracts.outcome import Outcome

FEW_TRIES: Final = (
    3  # of an event that is answered as if it will never be taken; by then some 5 min have gone
)
NOT_FOUND_TRIES: Final = 5  # 404 is a service that is being deployed for about 18 s, then a wrong URL
PAUSE: Final = timedelta(seconds=60)  # of an endpoint that answers 429 without Retry-After
RETRY_AFTER_MAX: Final = timedelta(hours=24)
REPLY_CUT: Final = "reply-cut"  # the answer began to be a reply and broke off


class Means(Enum):
    """What a status says about the message that it answers."""

    TAKEN = "taken"
    AGAIN = "tried again"
    SHORTLY = "tried again for a short while, then refused"
    FEW = "tried three times"
    PAUSE = "tried again; the endpoint is left alone meanwhile"
    REFUSED = "refused"
    GONE = "refused; the endpoint is disabled"
    LATER = "tried again; the endpoint is disabled until a person enables it"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what a status means for a command, and what for an event.

    `untouched`: who says it has not looked at the message, so a later refusal is still definite.
    """

    command: Means
    event: Means
    untouched: bool = False


STATUSES: Final[Mapping[int, Row]] = {
    404: Row(Means.SHORTLY, Means.AGAIN, untouched=True),
    408: Row(Means.AGAIN, Means.AGAIN),
    409: Row(Means.AGAIN, Means.AGAIN),  # the same Idempotency-Key is at work
    410: Row(Means.GONE, Means.LATER),
    425: Row(Means.AGAIN, Means.AGAIN, untouched=True),
    429: Row(Means.PAUSE, Means.PAUSE, untouched=True),
    501: Row(Means.REFUSED, Means.FEW),
    505: Row(Means.REFUSED, Means.FEW),
    511: Row(Means.REFUSED, Means.FEW),
}
"""Statuses that mean something else than their hundred."""

HUNDREDS: Final[Mapping[int, Row]] = {
    2: Row(Means.TAKEN, Means.TAKEN),
    3: Row(Means.REFUSED, Means.AGAIN),  # never followed
    4: Row(Means.REFUSED, Means.FEW),
    5: Row(Means.AGAIN, Means.AGAIN),
}

REMOVED: Final = "unknown-endpoint"  # of an event, whose endpoint was there when it was published

OURS: Final = frozenset(
    {
        REMOVED,
        "no-secret",
        "secret-unreadable",
        "bad-url",
        "bad-settings",
        "out-of-files",
        "claim-unknown",
        "payload-key-missing",
        "payload-unreadable",
    }
)
"""What ended a try on our side, before anything was dialled: the message's tries do not count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one try brought back.

    `status` is the peer's own word: None when none came, or none that HTTP knows; then `error_code` says what happened
    instead, and beside a status what is wrong with the reply that came with it. `reached` is False only when provably
    not one byte of the request was written. `body` holds at most the relay's `response_max` bytes and `truncated` says
    that there was, or may have been, more. `reply` is the body of a 200 or 201 that is a CloudEvent, when it came
    whole. `headers` are those that are kept. `cut_before`: within the same try it was sent before, over a kept
    connection that was cut, and may have arrived there.
    """

    status: int | None = None
    error_code: str | None = None
    reached: bool
    content_type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    truncated: bool = False
    reply: bytes | None = None
    retry_after: timedelta | None = None
    duration: timedelta = timedelta(0)
    cut_before: bool = False


def unsent(error_code: str) -> Answer:
    """A try that ended on our side, before anything was dialled."""
    return Answer(error_code=error_code, reached=False)


@dataclass(frozen=True, slots=True)
class Delivered:
    """The service has the message. Its reply is in the answer, or comes, or came, by itself."""

    word: ClassVar = "delivered"
    reached: ClassVar = True


@dataclass(frozen=True, slots=True)
class Retry:
    """Send it again `after` this long, under the same identity.

    `reached`: the service may have acted, so a later refusal is no longer definite. `pause`: leave the whole
    endpoint alone for so long. `disable`: send it nothing until a person enables it. `clamped`: it asked to be left
    alone for longer than `RETRY_AFTER_MAX`.
    """

    word: ClassVar = "retry"
    after: timedelta
    reached: bool
    pause: timedelta | None = None
    disable: bool = False
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class Spared:
    """We are to blame: send it again `after` this long. The try does not count. Nothing was dialled, or `reached`."""

    word: ClassVar = "spared"
    after: timedelta
    reached: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The service definitely did not act on this try. `disable`: the endpoint is gone for good (410)."""

    word: ClassVar = "refused"
    reached: ClassVar = False
    outcome: Outcome
    disable: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    """It was the last try: the message is a dead letter, and `code` says what the last answer was."""

    word: ClassVar = "dead"
    code: str
    reached: bool
    pause: timedelta | None = None
    disable: ClassVar = False


Verdict = Delivered | Retry | Spared | Refused | Dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """The try that was answered.

    `attempt` is its number among those that count, from 1; `age` how long ago the message was made. `command` is
    False for an event. `schedule` is what the endpoint says, if it says anything.
    """

    message_id: UUID
    attempt: int
    endpoint: str
    command: bool = True
    age: timedelta = timedelta(0)
    schedule: Schedule | None = None

    @property
    def is_one_of_few(self) -> bool:
        """Whether it was the last try of what will hardly be taken; an endpoint's own schedule says it otherwise."""
        return self.schedule is None and self.attempt >= FEW_TRIES

    def next_after(self) -> timedelta | None:
        """How long to wait for the next one; None when there is none."""
        schedule = self.schedule or (COMMAND_SCHEDULE if self.command else EVENT_SCHEDULE)
        return schedule.after(self.attempt, age=self.age, chance=chance_of(self.message_id, self.attempt))


def judge(answer: Answer, this: Try) -> Verdict:
    """What becomes of a message after `this` try.

    A command has no last attempt, unless its endpoint's schedule says so: it is tried until its `expires_at`, which
    its claim checks, and whoever waits for it takes it back. Whether a refusal is definite is decided under the lock
    (`waypost.settle`), which knows the earlier tries.

    Source: docs/participants.md, the answers; RFC 9110, section 10.2.3 (Retry-After must be observed).
    """
    status = answer.status
    if status is None:
        if answer.error_code == REMOVED and not this.command:
            return Dead(REMOVED, reached=False)
        if answer.error_code in OURS and not answer.reached:
            return Spared(COMMAND_SCHEDULE.after(this.attempt) or PAUSE)
        return again(answer, this, reached=answer.reached)
    row = STATUSES.get(status) or HUNDREDS[status // 100]
    means = row.command if this.command else row.event
    if means is Means.TAKEN and answer.error_code != REPLY_CUT:
        return Delivered()
    ends = means in {Means.REFUSED, Means.GONE} or (
        means is Means.SHORTLY and this.attempt >= NOT_FOUND_TRIES
    )
    if ends and not (answer.cut_before and means is not Means.GONE):
        return refused(status, this, disable=means is Means.GONE)
    # Whoever answers with the reply posts none: what broke off is said again when the command comes again.
    return again(
        answer,
        this,
        reached=answer.cut_before or not row.untouched,
        pause=PAUSE if means is Means.PAUSE else None,
        few=means is Means.FEW,
        disable=means is Means.LATER,
    )


def again(
    answer: Answer,
    this: Try,
    *,
    reached: bool,
    pause: timedelta | None = None,
    few: bool = False,
    disable: bool = False,
) -> Verdict:
    """The next try, or the end of all. Retry-After delays it, and never hurries it; `pause` is what an endpoint is
    left alone for that does not say for how long. A disabled endpoint has no last try: what waits for it waits.
    """
    asked = answer.retry_after or timedelta(0)
    wanted = min(asked, RETRY_AFTER_MAX)
    if pause is not None:
        pause = wanted or pause
    after = None if few and this.is_one_of_few else this.next_after()
    if after is None and not disable:
        return Dead(code_of(answer), reached, pause)
    delay = max(after or timedelta(0), pause or wanted)
    return Retry(delay, reached, pause, disable, clamped=asked > RETRY_AFTER_MAX)


def refused(status: int, this: Try, *, disable: bool) -> Refused:
    outcome = Outcome(
        "refused",
        code=f"http-{status}",
        detail=f"endpoint {this.endpoint} answered {status}",
        data={"status": status},
    )
    return Refused(outcome, disable=disable)


def code_of(answer: Answer) -> str:
    """What an answer was, in one word: `http-503`, `timeout`."""
    return answer.error_code or f"http-{answer.status}"


def chance_of(message_id: UUID, attempt: int) -> float:
    """Where in its jitter a delay lies, 0 to 1: another for each message and attempt, the same whoever asks."""
    drawn = hashlib.sha256(message_id.bytes + attempt.to_bytes(4, "big")).digest()
    return int.from_bytes(drawn[:4], "big") / 0xFFFFFFFF
