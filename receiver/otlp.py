"""Spans to an OpenTelemetry collector, by OTLP over HTTP. The environment says where and how, as everywhere:
`OTEL_EXPORTER_OTLP_ENDPOINT` and what goes with it.

Spans are made of data here (`contracts.spans`), after what they tell of, and not by a tracer: the constructor of the
SDK's `ReadableSpan` is used for that, which is its contract with exporters.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeVar, cast

from opentelemetry import context as carried
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from contracts.observer import Observer
from contracts.spans import Collector, Span
from contracts.trace import Trace

T = TypeVar("T")

SCOPE: Final = InstrumentationScope("waypost")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SPANS_MAX: Final = 512
"""In one request."""

SPOOLED_MAX: Final = 2048
"""Spans that a service keeps until they are taken; the oldest are dropped."""

SPOOL_SECONDS: Final = 1.0
"""How long a service gathers spans before it sends them."""

FLUSH_SECONDS: Final = 3.0
"""For the last spans of a process that ends; then they are left, or dropped."""


class Otlp:
    """The collector of the environment. `service` is the name of this process, unless `OTEL_SERVICE_NAME` has one."""

    def __init__(self, service: str) -> None:
        self._resource = resource_of(service)
        self._exporter = OTLPSpanExporter()

    async def export(self, spans: Sequence[Span]) -> bool:
        """Send `spans`, those that are to be sampled. The exporter tries again by itself, within its timeout."""
        made = [readable(span, self._resource) for span in spans if span.at.flags and span.ended is not None]
        for begin in range(0, len(made), SPANS_MAX):
            part = made[begin : begin + SPANS_MAX]
            if await aside(partial(self._exporter.export, part)) is not SpanExportResult.SUCCESS:
                return False
        return True

    def close(self) -> None:
        """Try no more. Whatever is being sent gives up."""
        self._exporter.shutdown()


def resource_of(service: str) -> Resource:
    named = Resource.create()
    if not str(named.attributes.get(SERVICE_NAME)).startswith("unknown_service"):
        return named
    return named.merge(Resource({SERVICE_NAME: service}))


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread that nobody waits for at the end of the process: a collector may hang."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if told.done():
            return
        if error is not None:
            told.set_exception(error)
        else:
            told.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001  # whoever waits gets it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="otlp", daemon=True).start()
    return await told


def readable(span: Span, resource: Resource) -> ReadableSpan:
    context = context_of(span.at)
    parent = None if span.parent is None else context_of(Trace(span.at.trace_id, span.parent, span.at.flags))
    error = {} if span.error is None else {"error.type": span.error}
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=parent,
        resource=resource,
        attributes={**span.attributes, **error},
        links=[Link(context_of(link.to), {"waypost.link.type": link.kind}) for link in span.links],
        kind=SpanKind[span.kind.upper()],
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR),
        start_time=nanoseconds(span.began),
        end_time=nanoseconds(span.ended or span.began),
        instrumentation_scope=SCOPE,
    )


def context_of(at: Trace) -> SpanContext:
    return SpanContext(
        int(at.trace_id, 16), int(at.span_id, 16), is_remote=True, trace_flags=TraceFlags(at.flags)
    )


@contextmanager
def within(at: Trace) -> Generator[None]:
    """What is traced inside, by whatever library, is under the span `at`, which is exported when it is over."""
    token = carried.attach(set_span_in_context(NonRecordingSpan(context_of(at))))
    try:
        yield
    finally:
        carried.detach(token)


def nanoseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000


class Spool:
    """The spans of a service on their way to `collector`. What is not taken is kept, up to SPOOLED_MAX."""

    def __init__(self, collector: Collector, observer: Observer) -> None:
        self._collector = collector
        self._observer = observer
        self._waiting: deque[Span] = deque()

    def add(self, span: Span) -> None:
        self._waiting.append(span)
        self._bound()

    def _bound(self) -> None:
        over = len(self._waiting) - SPOOLED_MAX
        if over > 0:
            for _ in range(over):
                self._waiting.popleft()
            self._observer.saw("spans.dropped", count=over)

    async def flush(self) -> None:
        spans = list(self._waiting)
        self._waiting.clear()
        if spans and not await self._collector.export(spans):
            self._waiting.extendleft(reversed(spans))
            self._bound()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SPOOL_SECONDS)
            await self.flush()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Send what comes while inside; at the end, what is left."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self.flush()
            self._collector.close()
