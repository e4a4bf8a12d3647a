"""Sends a trace to an OpenTelemetry collector by OTLP over HTTP, with the official exporter and its variables.

The exporter retries a request that the collector could not accept. If its retries fail, the export ends.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING

from forebay.core.addresses import is_http_url, without_login
from forebay.core.errors import ForebayError, InvalidInput, MissingExtra
from forebay.telemetry.trace_db import TraceDB

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from forebay.telemetry.export.otel_spans import Content

BATCH_SIZE = 512
DEFAULT_ENDPOINT = "http://localhost:4318"
PROTOCOL = "http/protobuf"


class OtlpExport:
    """Sends the spans of a trace in batches."""

    def __init__(self) -> None:
        """Raises ``MissingExtra`` without the SDK, ``InvalidInput`` if the variables select another protocol."""
        _check_protocol()
        self.endpoint = _endpoint()
        self.num_sent = 0
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otel") from None
        self._exporter: SpanExporter = OTLPSpanExporter()

    def send(self, db: TraceDB, content: "Content | None" = None) -> None:
        """Send all spans of ``db``, including those that had not ended, with the messages of ``content``.

        Raises ``ForebayError``.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        from forebay.telemetry.export.otel_spans import otel_spans

        spans = otel_spans(db, content)
        with _log_of_sdk() as log:
            while batch := list(islice(spans, BATCH_SIZE)):
                if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                    reason = log.buffer[-1].getMessage() if log.buffer else "no answer"
                    raise ForebayError(
                        f"the collector at {self.endpoint} failed after {self.num_sent:,} spans: {reason}",
                        hint="OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS set the address and the key; "
                        "then export again: the spans keep their ids",
                    )
                self.num_sent += len(batch)

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


@contextmanager
def _log_of_sdk() -> Iterator[BufferingHandler]:
    """Collect the SDK's last log messages, which would otherwise be written to standard error on each attempt."""
    logger, log = logging.getLogger("opentelemetry"), BufferingHandler(100)
    did_propagate, logger.propagate = logger.propagate, False
    logger.addHandler(log)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.propagate = did_propagate


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
