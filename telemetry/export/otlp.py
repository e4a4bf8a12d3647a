"""Sends a trace to an OpenTelemetry collector by OTLP over HTTP, with the official exporter and its variables.

The exporter retries a request that the collector could not accept. If its retries fail, the export ends.
"""

import logging
import os
from typing import TYPE_CHECKING

from forebay.core.addresses import is_http_url, without_login
from forebay.core.errors import ForebayError, InvalidInput, MissingExtra
from forebay.telemetry.export.otel_spans import OtelSpans
from forebay.telemetry.trace_db import TraceDB

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

EXTRA = "otel"
BATCH_SIZE = 512
DEFAULT_ENDPOINT = "http://localhost:4318"
PROTOCOL = "http/protobuf"


class OtlpExport:
    """Sends the spans of traces in batches."""

    def __init__(self) -> None:
        """Raises ``MissingExtra`` without the SDK, ``InvalidInput`` if the variables select another protocol."""
        _check_protocol()
        self.endpoint = _endpoint()
        self._log = _LastMessage()
        self._exporter = self._make_exporter()
        self._waiting: list[ReadableSpan] = []
        self.num_sent = 0

    def send(self, db: TraceDB) -> None:
        """Send all spans of ``db``, including those that had not ended. Raises ``ForebayError``."""
        for span in OtelSpans().of(db):
            self._waiting.append(span)
            if len(self._waiting) == BATCH_SIZE:
                self._send()
        self._send()

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
        self._log.leave()

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if not self._waiting:
            return
        if self._exporter.export(self._waiting) is not SpanExportResult.SUCCESS:
            reason = self._log.text or "no answer"
            raise ForebayError(
                f"the collector at {self.endpoint} failed after {self.num_sent:,} spans: {reason}",
                hint="OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS set the address and the key; "
                "then export again: the spans keep their ids",
            )
        self.num_sent += len(self._waiting)
        self._waiting = []

    def _make_exporter(self) -> "SpanExporter":
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            self._log.leave()
            raise MissingExtra("opentelemetry-exporter-otlp-proto-http", EXTRA) from None
        return OTLPSpanExporter()


class _LastMessage(logging.Handler):
    """Keeps the SDK's last log message, which would otherwise be written to standard error on each attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._logger = logging.getLogger("opentelemetry")
        self._did_propagate = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.text = record.getMessage()

    def leave(self) -> None:
        """Restore the SDK's logging."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._did_propagate


def _endpoint() -> str:
    """The address that the exporter uses, without a password."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    name = next((name for name in names if os.environ.get(name)), "")
    if not name:
        return DEFAULT_ENDPOINT
    if not is_http_url(os.environ[name]):
        raise InvalidInput(f"{name} is not an http address", hint=f"use an address like {DEFAULT_ENDPOINT}")
    return without_login(os.environ[name])


def _check_protocol() -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            if protocol == PROTOCOL:
                return
            hint = f"use {PROTOCOL}, and an address that accepts it: collectors listen for it on port 4318"
            raise InvalidInput(f"{name} is {protocol!r}, but only {PROTOCOL} is supported", hint=hint)
