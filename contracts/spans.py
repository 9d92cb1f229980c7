"""Spans as data: what happened, from when to when, and under what. They are made from what was written down, after
it happened; nothing is open while work goes on, so nothing is lost with a process.

Source: OpenTelemetry semantic conventions (messaging spans, CloudEvents spans, HTTP spans); W3C Trace Context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, Protocol, TypeAlias

from contracts.trace import Trace

Kind: TypeAlias = Literal["internal", "producer", "client", "server", "consumer"]
Attributes: TypeAlias = Mapping[str, str | int | float | bool]

NAMES: Final = (
    *("start", "turn", "create", "send", "process", "POST", "wait", "attempt", "compensate", "timer"),
    *("approval", "child", "hold", "operator", "late", "segment", "continue", "end"),
)
"""What the name of a span begins with; docs/telemetry.md explains each."""


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that has to do with one; `kind` says how: `sender`, `delivery`, `previous_segment`, …"""

    to: Trace
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`at` are its own ids, `parent` the span of the same trace that it is under. `ended` is None while it is under
    way; then it is shown, and not exported. `error` is a code, for what did not end well.
    """

    name: str
    at: Trace
    parent: str | None
    began: datetime
    ended: datetime | None
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict[str, "str | int | float | bool"])
    error: str | None = None
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.partition(" ")[0] in NAMES, f"span {self.name}: of no kind that is documented"


class Collector(Protocol):
    """Takes spans. `export` says whether it has them now; `close` ends what is under way."""

    async def export(self, spans: Sequence[Span]) -> bool: ...

    def close(self) -> None: ...


ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def has_collector(environment: Mapping[str, str]) -> bool:
    """Whether the environment names a collector, and nothing in it says that spans stay here."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    other = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in {"", "otlp"}
    return not off and not other and any(environment.get(name, "").strip() for name in ENDPOINTS)
