"""A log brought to an exporter, once or as it grows: until its run has ended, or somebody presses Ctrl-C."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from forebay.telemetry.export.server_intervals import LAST_STATES
from forebay.telemetry.tracing.read_trace import TraceFolder, TraceLine
from forebay.telemetry.tracing.records import GroupChange, ProcessChange, Record

POLL_S = 1.0
FLUSH_S = 1.0
"""Processes write twice a second."""
QUIET_S = 30.0
"""A run whose process has ended is over when its groups are delivered, or when nothing has come for so long."""


class Sink(Protocol):
    """What takes the lines of a log."""

    def add(self, line: TraceLine) -> None:
        """Take one."""

    def flush(self) -> None:
        """Bring out what was taken so far."""

    def finish(self) -> None:
        """There are no more."""


class CtrlC:
    """Takes the first Ctrl-C as the wish to end well; the second one is as any."""

    def __init__(self) -> None:
        self._has_come = threading.Event()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within this it is taken."""
        before = signal.getsignal(signal.SIGINT)

        def note(*_: Any) -> None:
            signal.signal(signal.SIGINT, before)
            self._has_come.set()

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than until it comes; whether it has."""
        return self._has_come.wait(seconds)


def export_log(folder: TraceFolder, sink: Sink) -> None:
    """All lines that are there."""
    for line in folder.merged():
        sink.add(line)
    sink.finish()


def follow_log(folder: TraceFolder, sink: Sink, ctrl_c: CtrlC, refresh: Callable[[], object]) -> None:
    """All lines, also those to come. ``refresh`` brings the folder up to date."""
    end = _LogEnd()
    while True:
        for line in folder.merged(is_complete=False):
            end.note(line.record)
            sink.add(line)
        sink.flush()
        # A refresh may fetch all of the log: no more than a tenth of the time goes into it.
        if end.has_come() or ctrl_c.wait(max(POLL_S, end.last_refresh_s * 9)):
            break
        began_s = time.monotonic()
        refresh()
        end.last_refresh_s = time.monotonic() - began_s
    export_log(folder, sink)


class _LogEnd:
    """Whether the run of a log is over."""

    def __init__(self) -> None:
        self.last_refresh_s = 0.0
        self._waiting: set[str] = set()
        self._is_working = True
        self._changed_ns = 0
        self._news_s = time.monotonic()

    def note(self, record: Record) -> None:
        """One more line."""
        self._news_s = time.monotonic()
        if isinstance(record, GroupChange):
            (self._waiting.discard if record.state in LAST_STATES else self._waiting.add)(record.group)
        elif isinstance(record, ProcessChange) and record.t >= self._changed_ns:
            self._changed_ns = record.t
            self._is_working = record.what in ("started", "restarted")

    def has_come(self) -> bool:
        """Its process has ended, its groups are where they stay, and what was still to be written of them has come."""
        quiet_s = time.monotonic() - self._news_s
        return not self._is_working and quiet_s > (QUIET_S if self._waiting else FLUSH_S)
