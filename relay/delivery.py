"""What an answer means for the message that it answers: the table of docs/participants.md, as data in and data out."""

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

from contracts.backoff import delay_after
from contracts.outcome import Outcome

NOT_FOUND_TRIES: Final = 5  # 404 is a service that is being deployed for about 18 s, then a wrong URL
PAUSE: Final = timedelta(seconds=60)  # of an endpoint that answers 429 without Retry-After
RETRY_AFTER_MAX: Final = timedelta(hours=24)
REPLY_CUT: Final = "reply-cut"  # the answer began to be a reply and broke off

TRIED_AGAIN: Final = frozenset({404, 408, 409, 425, 429})  # of the 4xx; every other one is a refusal
NOT_ACTED_ON: Final = frozenset({404, 425, 429})  # said before the service looked at the command
REFUSED_5XX: Final = frozenset({501})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one try brought back.

    `status` is the peer's own word: None when none came, or none that HTTP knows; then `error_code` says what
    happened instead, and beside a status what is wrong with the reply that came with it. `reached` is False
    only when provably not one byte of the request was written. `body` holds at most the relay's
    `response_max` bytes and `truncated` says that there was, or may have been, more. `reply` is the body of a
    200 or 201 that is a CloudEvent, when it came whole.
    """

    status: int | None = None
    error_code: str | None = None
    reached: bool
    content_type: str = ""
    body: bytes = b""
    truncated: bool = False
    reply: bytes | None = None
    retry_after: timedelta | None = None
    duration: timedelta = timedelta(0)


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
    endpoint alone for so long.
    """

    word: ClassVar = "retry"
    after: timedelta
    reached: bool
    pause: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The service definitely did not act on this try. `disable`: the endpoint is gone for good (410)."""

    word: ClassVar = "refused"
    reached: ClassVar = False
    outcome: Outcome
    disable: bool = False


Verdict = Delivered | Retry | Refused


def judge(answer: Answer, *, attempt: int, endpoint: str) -> Verdict:
    """What becomes of a command after its `attempt`-th try (from 1), to the endpoint of that name.

    There is no last attempt: a command is tried until its `expires_at`, which its claim checks, and whoever
    waits for it takes it back. Whether a refusal is definite is decided under the lock (`waypost.settle`),
    which knows the earlier tries.

    Source: docs/participants.md, the answers; RFC 9110, section 10.2.3 (Retry-After must be observed).
    """
    status = answer.status
    if status is None:
        return Retry(delay_after(attempt), answer.reached)
    if 200 <= status < 300:
        # Whoever answers with the reply posts none: what broke off is said again when the command comes again.
        return Retry(delay_after(attempt), reached=True) if answer.error_code == REPLY_CUT else Delivered()
    if _is_tried_again(status) and not (status == 404 and attempt >= NOT_FOUND_TRIES):
        pause = min(answer.retry_after or timedelta(0), RETRY_AFTER_MAX)
        if status == 429:
            pause = pause or PAUSE
        return Retry(
            max(delay_after(attempt), pause),
            reached=status not in NOT_ACTED_ON,
            pause=pause if status == 429 else None,
        )
    return Refused(
        Outcome(
            "refused",
            code=f"http-{status}",
            detail=f"endpoint {endpoint} answered {status}",
            data={"status": status},
        ),
        disable=status == 410,
    )


def _is_tried_again(status: int) -> bool:
    return status in TRIED_AGAIN or (status >= 500 and status not in REFUSED_5XX)
