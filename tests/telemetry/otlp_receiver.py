"""A collector for tests: takes OTLP over HTTP, and decodes it with the official protobufs."""

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


def plain(value: AnyValue) -> Any:
    """What an attribute is worth."""
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


@dataclass
class Receiver:
    """What came, and what is answered."""

    port: int = 0
    statuses: list[int] = field(default_factory=list)
    """What is answered to the next requests, before 200."""
    num_rejected: int = 0
    longest: int = 1 << 30
    """Bytes of the longest body that is taken."""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_asked: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def resources(self) -> list[ResourceSpans]:
        return [each for request in self.requests for each in request.resource_spans]

    @property
    def spans(self) -> list[Span]:
        return [span for resource in self.resources for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def take(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        self.num_asked += 1
        status = self.statuses.pop(0) if self.statuses else 200
        body = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        if path != "/v1/traces":
            return 404, b""
        if len(body) > self.longest:
            return 413, b""
        if status == 200:
            self.requests.append(ExportTraceServiceRequest.FromString(body))
            self.headers.append(headers)
        partial = ExportTracePartialSuccess(rejected_spans=self.num_rejected)
        return status, ExportTraceServiceResponse(partial_success=partial).SerializeToString()

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Within this it answers; again on the same port, if it did before."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, reply = receiver.take(self.path, body, dict(self.headers))
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as server:
            self.port = server.server_address[1]
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    with receiver.listening():
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
        yield receiver
