"""The server's part of the traces of its runs: where they lie, and one recorder for each run."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, monotonic_ns, time_ns
from typing import Any

import msgspec

from forebay.core.run import Run
from forebay.server.tracing.read_records import ReadRecords
from forebay.telemetry.tracing.records import LoopStall, Record
from forebay.telemetry.tracing.stall_watch import Stall
from forebay.telemetry.tracing.tracer import Tracer, TraceSettings, start_tracing


def start_of(run: Run) -> int:
    """Which start of the run is recorded: that of one that is still looked at is about to be the first."""
    return max(1, run.num_starts)


class RunTrace:
    """What the server records of one run. The first record opens a file; ``rest`` closes it."""

    def __init__(self, run: Run, settings_of: Callable[[Run], TraceSettings], busy: "dict[str, RunTrace]") -> None:
        self.run = run
        self._busy = busy
        self.reads = ReadRecords(self, lambda: self.run.weight_version)
        self.last_record_s = 0.0
        """By ``time.monotonic``."""
        self.dropped: Counter[str] = Counter(spans=0, summaries=0)
        """Spans and summaries that its processes could not write, or that went for want of room."""
        self._settings_of = settings_of
        self._tracer: Tracer | None = None
        self._start = 0
        self._replaced: list[Tracer] = []

    @property
    def rate(self) -> float:
        return self._settings_of(self.run).rate

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be written, as on a full disk."""
        return self._tracer is not None and self._tracer.has_ended

    def at(self, monotonic_s: float) -> int:
        return self._current().at(monotonic_s)

    def write(self, record: Record) -> None:
        self.last_record_s = monotonic()
        self._busy[self.run.run_id] = self
        self._current().write(record)

    def write_if_open(self, record: Record) -> None:
        """Take a record from another thread than the loop's, if there was one before."""
        if self._tracer is not None:
            self._tracer.write(record)

    def _current(self) -> Tracer:
        start = start_of(self.run)
        if self._tracer is None or self._start != start:
            if self._tracer is not None:  # not closed here: that writes
                self._replaced.append(self._tracer)
            self._start = start
            self._tracer = start_tracing(self._settings_of(self.run), "server")
        return self._tracer

    def close_earlier(self) -> None:
        """Close the files of earlier starts; it writes, and thus is not for the loop's thread."""
        while self._replaced:
            self._replaced.pop().close()

    def rest(self) -> None:
        """Close all files until there is something to record; not for the loop's thread."""
        self.close_earlier()
        if self._tracer is not None:
            self._tracer.rest()

    def flush(self) -> None:
        """Write what was recorded so far; not for the loop's thread."""
        if self._tracer is not None:
            self._tracer.flush()

    def view(self) -> dict[str, Any]:
        """What there is to say of it in the run's status."""
        return {
            "has_ended": self.has_ended,
            "dropped": {what: self.dropped[what] for what in ("spans", "summaries")},
        }


class RunTraces:
    """The traces of all runs."""

    def __init__(self, folder_of: Callable[[str], Path], max_bytes: int) -> None:
        """``folder_of`` a run's id; the files of all its processes take ``max_bytes``, and 0 keeps summaries alone."""
        self.folder_of = folder_of
        self.max_bytes = max_bytes
        self._traces: dict[str, RunTrace] = {}
        self.busy: dict[str, RunTrace] = {}
        """Those to look after: of runs that have not ended, or of which something was recorded since the last look."""

    def of(self, run: Run) -> RunTrace:
        """The trace of a run, which goes on when the run is loaded again."""
        trace = self._traces.setdefault(run.run_id, RunTrace(run, self.settings, self.busy))
        trace.run = run
        if not run.has_ended:
            self.busy[run.run_id] = trace
        return trace

    def get(self, run_id: str) -> RunTrace:
        """That of a run that was loaded."""
        return self._traces[run_id]

    def forget(self, run_id: str) -> None:
        """Drop the trace of a run that was removed."""
        self.busy.pop(run_id, None)
        del self._traces[run_id]

    def reads(self, run_id: str) -> ReadRecords:
        """The reads of that run."""
        return self._traces[run_id].reads

    @property
    def all(self) -> list[RunTrace]:
        """Those of all runs that were loaded."""
        return list(self._traces.values())

    def settings(self, run: Run) -> TraceSettings:
        """What a process of the run is told that records."""
        return TraceSettings(
            folder=str(self.folder_of(run.run_id)),
            run_id=run.run_id,
            start=start_of(run),
            rate=run.settings.trace_rate if self.max_bytes else 0.0,
            max_bytes=self.max_bytes,
        )

    def process_settings(self, run: Run) -> dict[str, Any]:
        """The same for another process."""
        return msgspec.structs.asdict(self.settings(run))


class AllRuns:
    """Stands for the traces of all runs that are alive: what holds up the server holds up each of them."""

    def __init__(self, traces: RunTraces) -> None:
        self._traces = traces
        self._offset_ns = time_ns() - monotonic_ns()

    def note_stall(self, stall: Stall) -> None:
        """The server's event loop stands still, or did; told from any thread."""
        record = LoopStall.of(stall, self._offset_ns)
        for trace in self._traces.all:
            if trace.run.is_alive:
                trace.write_if_open(record)
