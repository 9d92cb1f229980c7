"""Trace context as text, so that pure code can pass it on: spans are named by what they are of, not by
chance.

Source: W3C Trace Context, section 3.2 (traceparent).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Final

TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
OURS: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]")
"""A traceparent as we write it."""
SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Where something belongs: `trace_id` (32 hex digits), `span_id` (16), flags (bit 0: sampled)."""

    trace_id: str
    span_id: str
    flags: int = SAMPLED

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse(traceparent: str | None) -> Trace | None:
    """The trace that a traceparent names, None when it is not valid: then a new one starts."""
    parts = TRACEPARENT.fullmatch(traceparent or "")
    if parts is None:
        return None
    version, trace_id, span_id, flags, more = parts.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Trace(trace_id, span_id, int(flags, 16) & SAMPLED)


def written(traceparent: object) -> str | None:
    """`traceparent`, which somebody else sent, in the form that we write; None when it names no trace."""
    if not isinstance(traceparent, str):
        return None
    if OURS.fullmatch(traceparent):  # almost all are, and need not be taken apart
        return traceparent
    found = parse(traceparent)
    return None if found is None else str(found)


def child(traceparent: str, key: str) -> str:
    """The traceparent of span `key` in the trace of `traceparent`; in a new one without it."""
    parent = parse(traceparent)
    if parent is None:
        return root(key)
    return str(replace(parent, span_id=digest(f"{parent.trace_id}/{key}")[:16]))


def root(key: str) -> str:
    """The traceparent of a trace of its own, named after `key`."""
    name = digest(key)
    return str(Trace(name[:32], name[32:48]))


def digest(key: str) -> str:
    """64 hex digits, of which no part that is used here is all zero in any practical world."""
    return hashlib.sha256(key.encode()).hexdigest()


def segment(traceparent: str, position: int) -> str:
    """The traceparent of the part of an execution's trace that begins at `position` of its journal."""
    first = parse(traceparent)
    anchor = root(f"{first.trace_id if first else traceparent}/segment/{position}")
    return anchor if first is None or first.flags else anchor[:-2] + "00"


def event(sender: str, source: str, identity: str) -> str:
    """The traceparent of the trace that begins where an event of `sender` was taken in: it answers nobody."""
    return root(f"event/{len(sender)}/{sender}/{len(source)}/{source}/{identity}")


def hop(message: object, attempt: int) -> str:
    """The key of the span of one try to send a message, under the span of the message."""
    return f"{message}/{attempt}"
