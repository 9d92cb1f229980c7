"""An OpenTelemetry collector for tests: it decodes what OTLP over HTTP brings, and keeps it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Wire
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.waiting import until_true

ERROR: Final = Status.STATUS_CODE_ERROR


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as it came. Times are nanoseconds since 1970."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]
    links: list[tuple[str, str, str]]
    is_error: bool


@dataclass(slots=True)
class Collector:
    """`answers` are statuses of the next requests; after them each gets 200. A refused request is not kept."""

    port: int
    spans: list[Seen] = field(default_factory=list[Seen])
    answers: list[int] = field(default_factory=list[int])
    requests: int = 0
    hang: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}"}

    def take(self, path: str, body: bytes) -> int:
        """The answer to a request."""
        with self.lock:
            self.requests += 1
            status = self.answers.pop(0) if self.answers else 200
            if path != "/v1/traces":
                return 404
            if status == 200:
                self.spans += decoded(body)
        return status

    def named(self, name: str) -> list[Seen]:
        with self.lock:
            return [span for span in self.spans if span.name == name]

    def until(self, name: str, *, times: int = 1) -> list[Seen]:
        """The spans of a name, each once, when there are so many different ones."""

        def there() -> bool:
            return len({span.span_id for span in self.named(name)}) >= times

        try:
            until_true(there, what=f"{times} spans {name}")
        except AssertionError:
            raise AssertionError(
                f"no {times} spans {name} in {sorted(span.name for span in self.spans)}"
            ) from None
        return list({span.span_id: span for span in self.named(name)}.values())


def decoded(body: bytes) -> list[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        seen(span, str(values(part.resource.attributes).get("service.name")))
        for part in request.resource_spans
        for scope in part.scope_spans
        for span in scope.spans
    ]


def seen(span: Wire, service: str) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        kind=Wire.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=values(span.attributes),
        links=[
            (link.trace_id.hex(), link.span_id.hex(), str(values(link.attributes)["waypost.link.type"]))
            for link in span.links
        ],
        is_error=span.status.code == ERROR,
    )


def values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in attributes:
        assert isinstance(one, KeyValue)
        found[one.key] = getattr(one.value, one.value.WhichOneof("value") or "string_value")
    return found


@contextmanager
def collecting() -> Generator[Collector]:
    """A collector that listens while inside. While `hang` is set, it answers nobody."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            while collector.hang.is_set() and not over.wait(0.01):
                pass
            status = collector.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            try:
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                return  # whoever asked is dead

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its base class's word
            return

    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
