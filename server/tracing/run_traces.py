"""The server's part of its runs' traces: their folders, and one recorder per run."""

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
    """The number of the run's recorded start; a run that is still being checked is about to make its first."""
    return max(1, run.num_starts)


class RunTrace:
    """Writes the server's records of one run. The first record opens a file; ``rest`` closes it."""

    def __init__(self, run: Run, settings_of: Callable[[Run], TraceSettings], busy: "dict[str, RunTrace]") -> None:
        self.run = run
        self._busy = busy
        self.reads = ReadRecords(self, lambda: self.run.weight_version)
        self.last_record_s = 0.0
        """Time of the last record, by ``time.monotonic``."""
        self.dropped: Counter[str] = Counter(spans=0, summaries=0)
        """Spans and summaries that its processes could not write, or that were removed to meet the budget."""
        self._settings_of = settings_of
        self._tracer: Tracer | None = None
        self._start = 0
        self._replaced: list[Tracer] = []

    @property
    def rate(self) -> float:
        return self._settings_of(self.run).rate

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be written, for example on a full disk."""
        return self._tracer is not None and self._tracer.has_ended

    def at(self, monotonic_s: float) -> int:
        return self._current().at(monotonic_s)

    def write(self, record: Record) -> None:
        self.last_record_s = monotonic()
        self._busy[self.run.run_id] = self
        self._current().write(record)

    def write_if_open(self, record: Record) -> None:
        """Write a record from another thread than the loop's, unless no file is open yet."""
        if self._tracer is not None:
            self._tracer.write(record)

    def _current(self) -> Tracer:
        start = start_of(self.run)
        if self._tracer is None or self._start != start:
            if self._tracer is not None:  # not closed here: closing writes
                self._replaced.append(self._tracer)
            self._start = start
            self._tracer = start_tracing(self._settings_of(self.run), "server")
        return self._tracer

    def close_earlier(self) -> None:
        """Close the files of earlier starts. Writes, so call it outside the event loop's thread."""
        while self._replaced:
            self._replaced.pop().close()

    def rest(self) -> None:
        """Close all files until the next record. Call it outside the event loop's thread."""
        self.close_earlier()
        if self._tracer is not None:
            self._tracer.rest()

    def flush(self) -> None:
        """Write all records so far. Call it outside the event loop's thread."""
        if self._tracer is not None:
            self._tracer.flush()

    def view(self) -> dict[str, Any]:
        """The trace's entry in the run's status."""
        return {
            "has_ended": self.has_ended,
            "dropped": {what: self.dropped[what] for what in ("spans", "summaries")},
        }


class RunTraces:
    """The traces of all runs."""

    def __init__(self, folder_of: Callable[[str], Path], max_bytes: int) -> None:
        """``folder_of`` maps a run's id to its folder. ``max_bytes`` limits a run's files; 0 keeps only summaries."""
        self.folder_of = folder_of
        self.max_bytes = max_bytes
        self._traces: dict[str, RunTrace] = {}
        self.busy: dict[str, RunTrace] = {}
        """Traces that need upkeep: of runs that have not ended, or with records since the last upkeep."""

    def of(self, run: Run) -> RunTrace:
        """The trace of a run, continued when the run is loaded again."""
        trace = self._traces.setdefault(run.run_id, RunTrace(run, self.settings, self.busy))
        trace.run = run
        if not run.has_ended:
            self.busy[run.run_id] = trace
        return trace

    def get(self, run_id: str) -> RunTrace:
        """The trace of a loaded run."""
        return self._traces[run_id]

    def forget(self, run_id: str) -> None:
        """Drop the trace of a run that was removed."""
        self.busy.pop(run_id, None)
        del self._traces[run_id]

    def reads(self, run_id: str) -> ReadRecords:
        """The read records of a run."""
        return self._traces[run_id].reads

    @property
    def all(self) -> list[RunTrace]:
        """The traces of all loaded runs."""
        return list(self._traces.values())

    def settings(self, run: Run) -> TraceSettings:
        """Trace settings for a process of the run."""
        return TraceSettings(
            folder=str(self.folder_of(run.run_id)),
            run_id=run.run_id,
            start=start_of(run),
            rate=run.settings.trace_rate if self.max_bytes else 0.0,
            max_bytes=self.max_bytes,
        )

    def process_settings(self, run: Run) -> dict[str, Any]:
        """Trace settings as JSON values, for another process."""
        return msgspec.structs.asdict(self.settings(run))


class AllRuns:
    """Records in the traces of all live runs: a stall of the server stalls each of them."""

    def __init__(self, traces: RunTraces) -> None:
        self._traces = traces
        self._offset_ns = time_ns() - monotonic_ns()

    def note_stall(self, stall: Stall) -> None:
        """Record a stall of the server's event loop, ended or not. Any thread may call it."""
        record = LoopStall.of(stall, self._offset_ns)
        for trace in self._traces.all:
            if trace.run.is_alive:
                trace.write_if_open(record)
