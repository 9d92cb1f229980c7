"""What an operator may set about the receiver. Every default is a limit of `contracts.limits`."""

from __future__ import annotations

from dataclasses import dataclass

from contracts import limits


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """Sizes are in bytes, times in seconds."""

    body_bytes_max: int = limits.EVENT_BYTES_MAX
    body_seconds: float = limits.RECEIVE_BODY_SECONDS
    header_seconds: float = limits.RECEIVE_HEADER_SECONDS
    concurrency_max: int = limits.RECEIVE_CONCURRENCY_MAX
    connections_max: int = limits.RECEIVE_CONNECTIONS_MAX
    batch_max: int = limits.RECEIVE_BATCH_MAX
    writers: int = limits.RECEIVE_WRITERS
    wait_seconds: float = limits.RECEIVE_WAIT_SECONDS
    drain_seconds: float = limits.RECEIVE_DRAIN_SECONDS
    senders_fresh_seconds: float = limits.SENDERS_FRESH_SECONDS
    senders_unknown_seconds: float = limits.SENDERS_UNKNOWN_SECONDS
    data_concurrency_max: int = limits.DATA_CONCURRENCY_MAX
    data_same_max: int = limits.DATA_SAME_MAX
    data_seconds: float = limits.DATA_SECONDS
    data_bytes_per_second: int = limits.DATA_BYTES_PER_SECOND
    tolerance_seconds: int = limits.TIMESTAMP_TOLERANCE_SECONDS
