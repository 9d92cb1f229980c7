"""What an operator may turn at the relay; every value has a default that is safe to keep."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from contracts.addresses import Network

MARGIN_MAX: Final = timedelta(seconds=10)
COUNTS: Final = (
    "batch",
    "concurrency",
    "endpoint_concurrency",
    "settle_batch",
    "sweep_batch",
    "response_max",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """`allow` names the networks that may be called although they are not public; plain http reaches only
    those.

    A claim must outlive the try that it covers, or a second relay sends the message while the first still
    does. So it lasts as long as its endpoint's timeout and `margin` more, at most `claim_lease`; a timeout
    that does not fit is cut. A message whose relay was killed is sent again after that time.
    """

    allow: tuple[Network, ...] = ()
    batch: int = 100  # messages of one claim
    concurrency: int = 200  # tries in flight, in this process
    endpoint_concurrency: int = 32  # tries in flight to one endpoint, so that one that hangs cannot take all
    settle_batch: int = 200  # results of one settlement
    claim_lease: timedelta = timedelta(seconds=310)  # fits the longest timeout that an endpoint can have
    connect_timeout: timedelta = timedelta(seconds=5)  # name, connection and TLS together
    keepalive: timedelta = timedelta(
        seconds=2
    )  # below the usual 5 s of servers: a stale connection eats a request
    response_max: int = 16 * 1024  # bytes of an answer that are read and kept; the table checks the same
    poll: timedelta = timedelta(milliseconds=500)  # between two looks for due messages when nobody hints
    sweep: timedelta = timedelta(seconds=1)  # between two looks for expired claims and messages
    sweep_batch: int = 200
    endpoint_cache: timedelta = timedelta(seconds=2)  # how long a changed URL or secret may go unnoticed
    drain: timedelta = timedelta(seconds=20)  # for the tries in flight at the end; above the default timeout
    reconnect_max: timedelta = timedelta(seconds=5)  # longest pause between two tries to reach the database

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        if self.claim_lease <= timedelta(0):
            raise ValueError(f"claim_lease: expected more than nothing, found {self.claim_lease}")

    @property
    def margin(self) -> timedelta:
        """How long a claim outlives its try, for the settlement."""
        return min(MARGIN_MAX, self.claim_lease / 4)

    @property
    def timeout_max(self) -> timedelta:
        return self.claim_lease - self.margin
