"""A trace to an OpenTelemetry collector, by OTLP over HTTP: the official exporter, told by its usual variables.

Spans go in batches, each until the collector has it: one that is away is asked again for as long as it takes. What it
refuses for good ends the export.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forebay.core.addresses import is_http_url, without_login
from forebay.core.backoff import Backoff
from forebay.core.errors import ForebayError, InvalidInput, MissingExtra
from forebay.telemetry.export.otel_spans import OtelSpans
from forebay.telemetry.tracing.read_trace import TraceLine

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

EXTRA = "otel"
BATCH_SIZE = 512
DEFAULT_ENDPOINT = "http://localhost:4318"
PROTOCOL = "http/protobuf"
TOO_LARGE = 413
PASSING_REFUSALS = frozenset({408, 425, 429})
"""Of the 4xx those that say: later."""


class OtlpExport:
    """Sends the spans of the lines that it is given. ``tell`` is called with what a user should know, a line each."""

    def __init__(self, tell: Callable[[str], object], wait: Callable[[float], object] = time.sleep) -> None:
        """``wait`` lets seconds pass while the collector is away; where it returns true, the export ends instead.

        Raises ``MissingExtra`` without the SDK, ``InvalidInput`` for variables that ask for another protocol.
        """
        _check_protocol()
        self.endpoint = _endpoint()
        self._tell = tell
        self._wait = wait
        self._replies = _Replies()
        self._log = _LastMessage()
        self._exporter = self._make_exporter()
        self._spans = OtelSpans()
        self._waiting: list[ReadableSpan] = []
        self._pause = Backoff(1.0, 30.0)
        self._is_away = False
        self.num_sent = 0

    @property
    def num_waiting(self) -> int:
        """Spans that the collector does not have yet."""
        return len(self._waiting)

    @property
    def num_rejected(self) -> int:
        """Spans that the collector said it does not keep."""
        return self._replies.num_rejected

    def add(self, line: TraceLine) -> None:
        """Take one more line; every so often that sends."""
        self._waiting.extend(self._spans.of(line))
        if len(self._waiting) >= BATCH_SIZE:
            self.flush()

    def flush(self) -> None:
        """Send what waits. Raises ``ForebayError`` if the collector refuses it for good."""
        size = BATCH_SIZE
        while self._waiting:
            batch = self._waiting[:size]
            if self._send(batch):
                del self._waiting[: len(batch)]
                self.num_sent += len(batch)
            elif self._replies.status == TOO_LARGE and size > 1:
                size = max(1, len(batch) // 2)
            else:
                self._wait_or_give_up()

    def finish(self) -> None:
        """The log has ended: send what had not ended when it did, too."""
        self._waiting.extend(self._spans.rest())
        self.flush()

    def close(self) -> None:
        """Let go of the connection."""
        self._exporter.shutdown()
        self._log.leave()

    def _send(self, batch: "list[ReadableSpan]") -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._replies.status = 0
        if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
            return False
        if self._is_away:
            self._is_away = False
            self._tell(f"the collector at {self.endpoint} answers again")
        self._pause.reset()
        return True

    def _wait_or_give_up(self) -> None:
        status, reason = self._replies.status, self._log.text or "no answer"
        if 400 <= status < 500 and status not in PASSING_REFUSALS:
            hint = "OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS say where spans go, and with which key"
            raise ForebayError(f"the collector at {self.endpoint} refuses the spans: status {status}", hint=hint)
        if not self._is_away:
            self._is_away = True
            self._tell(
                f"the collector at {self.endpoint} does not take the spans ({reason}); asking again until it does"
            )
        if self._wait(self._pause.next_s()):
            raise KeyboardInterrupt

    def _make_exporter(self) -> "SpanExporter":
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            self._log.leave()
            raise MissingExtra("opentelemetry-exporter-otlp-proto-http", EXTRA) from None
        return OTLPSpanExporter(session=self._replies.session())


class _Replies:
    """What the collector answered last, and how many spans it did not keep in all."""

    def __init__(self) -> None:
        self.status = 0
        """0 if nobody answered."""
        self.num_rejected = 0

    def session(self) -> Any:
        """Connections whose answers are noted here; None where a variable names a provider of such."""
        import requests

        if any(name.endswith("CREDENTIAL_PROVIDER") for name in os.environ if name.startswith("OTEL_PYTHON_")):
            return None
        session = requests.Session()
        session.hooks["response"].append(self._note)
        return session

    def _note(self, response: Any, *_: Any, **__: Any) -> None:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        self.status = response.status_code
        if response.ok:
            try:
                reply = ExportTraceServiceResponse.FromString(response.content)
            except DecodeError:  # some answer in JSON, or nothing of the kind
                return
            self.num_rejected += reply.partial_success.rejected_spans


class _LastMessage(logging.Handler):
    """Keeps what the SDK logs last, which would else be on standard error for each try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._logger = logging.getLogger("opentelemetry")
        self._did_propagate = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.text = record.getMessage()

    def leave(self) -> None:
        """Let the SDK log as before."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._did_propagate


def _endpoint() -> str:
    """Where the exporter sends to, without a password."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    name = next((name for name in names if os.environ.get(name)), "")
    if not name:
        return DEFAULT_ENDPOINT
    if not is_http_url(os.environ[name]):
        raise InvalidInput(f"{name} is no http address", hint=f"it looks like {DEFAULT_ENDPOINT}")
    return without_login(os.environ[name])


def _check_protocol() -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            if protocol == PROTOCOL:
                return
            hint = f"give {PROTOCOL}, and an address that takes it: collectors listen for it on port 4318"
            raise InvalidInput(f"{name} is {protocol!r}, and spans go by {PROTOCOL} alone", hint=hint)
