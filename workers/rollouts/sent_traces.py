"""The trace of a worker on a node that has not got the run's folder: its lines go to the lead, which writes them."""

import logging
from collections.abc import Callable

import msgspec

from forebay.telemetry.tracing.records import Head
from forebay.telemetry.tracing.run_tracer import trace_file_of
from forebay.telemetry.tracing.trace_file import TraceFile
from forebay.telemetry.tracing.tracer import run_tracer
from forebay.workers.rollouts.orders import TraceLines

logger = logging.getLogger(__name__)


class SentTrace:
    """In the worker, what its tracer has in place of a ``TraceFile``."""

    def __init__(self, head: Head, send: Callable[[TraceLines], None]) -> None:
        self._head, self._send = msgspec.json.encode(head), send

    def append(self, lines: bytes) -> None:
        """Send whole lines."""
        self._send(TraceLines(self._head, lines))

    def close(self) -> None:
        """Nothing is open here."""


class ReceivedTrace:
    """In the lead: one worker's, as files of its own, like those that workers of this machine write."""

    def __init__(self) -> None:
        self._file: TraceFile | None = None
        self._is_over = False

    def append(self, lines: TraceLines) -> None:
        """Write them. What goes wrong ends the trace, and costs no rollout."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._file = trace_file_of(run_tracer().settings, msgspec.json.decode(lines.head, type=Head))
            self._file.append(lines.lines)
        except Exception as error:  # noqa: BLE001 - a full disk, as a rule
            self._is_over = True
            logger.warning("the trace of a worker ends here, its rollouts go on: %s", error)

    def close(self) -> None:
        """No more will come."""
        if self._file is not None:
            self._file.close()
