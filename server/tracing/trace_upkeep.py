"""Regular upkeep of traces, in a thread: keeps budgets, closes files of ended runs, and sums up their numbers."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import BinaryIO, Self

import msgspec

from forebay.core.files import regular_opener
from forebay.core.tasks import TaskSet
from forebay.server.tracing.run_traces import AllRuns, RunTrace, RunTraces
from forebay.telemetry.tracing.read_trace import bounded_lines, trace_files
from forebay.telemetry.tracing.records import PHASES
from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.telemetry.tracing.trace_budget import enforce_budget
from forebay.telemetry.tracing.trace_file import FOREIGN_BYTES

EVERY_S = 5.0
IDLE_S = 10.0
"""An ended run's files are closed this long after its last record."""
MAX_OTHER_PHASES = 32
"""Distinct phase names from users' code that are counted apart; Prometheus keeps a series for each."""
OTHER = "other"
_NS = 1e9

logger = logging.getLogger(__name__)


class TraceUpkeep:
    """Maintains all traces while the server runs. Enter it with ``async with`` before any run is loaded."""

    def __init__(self, traces: RunTraces) -> None:
        self._traces = traces
        self._tail = TraceTail()
        self._looking = asyncio.Lock()
        self._tasks = TaskSet()
        self._watch = StallWatch()

    async def __aenter__(self) -> Self:
        self._watch.add(AllRuns(self._traces).note_stall)
        self._watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.stop()
        await self._tasks.cancel()
        for trace in self._traces.all:
            trace.reads.flush()
        await asyncio.to_thread(self._rest_all)

    async def begin(self) -> None:
        """Start, once runs are loaded and before any has a process: skip what an earlier server recorded."""
        folders = [self._traces.folder_of(trace.run.run_id) for trace in self._traces.all]
        await asyncio.to_thread(self._skip, folders)
        self._tasks.start(self._keep_looking())

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent in rollouts of all runs since the server started, by phase."""
        # Copied in one step: a thread may be adding to it.
        return dict(self._tail.seconds)

    @property
    def dropped(self) -> Counter[str]:
        """Spans and summaries missing from the traces of all runs since the server started."""
        return sum((trace.dropped for trace in self._traces.all), Counter())

    async def look(self) -> None:
        """Run all upkeep once."""
        async with self._looking:
            now_s = monotonic()
            for run_id, trace in list(self._traces.busy.items()):
                is_over = trace.run.has_ended and now_s - trace.last_record_s > IDLE_S
                if is_over:
                    trace.reads.flush()
                    self._traces.busy.pop(run_id, None)
                await asyncio.to_thread(self._look_at, trace, is_over)

    async def read_on(self) -> None:
        """Update the numbers."""
        async with self._looking:
            await asyncio.to_thread(self._read_all, list(self._traces.busy.values()))

    def _rest_all(self) -> None:
        for trace in self._traces.all:
            trace.rest()

    def _skip(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            self._tail.skip(folder)

    def _read_all(self, traces: Sequence[RunTrace]) -> None:
        for trace in traces:
            self._read(trace)

    def _look_at(self, trace: RunTrace, is_over: bool) -> None:
        self._read(trace)
        trace.close_earlier()
        if is_over:
            trace.rest()
        try:
            removed = enforce_budget(self._traces.folder_of(trace.run.run_id), self._traces.max_bytes)
        except OSError as error:  # a full disk, which is logged elsewhere; other traces still get their turn
            logger.debug("the trace of run %s cannot be trimmed to its budget for now: %s", trace.run.run_id, error)
        else:
            trace.dropped.update(spans=removed.spans, summaries=removed.summaries)

    def _read(self, trace: RunTrace) -> None:
        try:
            self._tail.read(self._traces.folder_of(trace.run.run_id), trace.dropped)
        except OSError as error:
            logger.debug("the trace of run %s cannot be read at the moment: %s", trace.run.run_id, error)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except Exception:  # a failure of tracing must not stop the server
                logger.exception("upkeep of traces failed; it is retried")


class _Summary(msgspec.Struct):
    """The fields used of a ``RolloutSummary``."""

    phases: dict[str, int] = {}


class _Dropped(msgspec.Struct):
    """The fields used of a ``Dropped``."""

    spans: int = 0
    summaries: int = 0


_decode_summary = msgspec.json.Decoder(_Summary).decode
_decode_dropped = msgspec.json.Decoder(_Dropped).decode


class TraceTail:
    """Reads what the processes of runs append to their traces, and sums it up since the server started.

    Decodes only summaries and counts of dropped records; checks only the beginning of other lines. Used by one thread
    at a time.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of rollouts, by phase."""
        self._read: dict[Path, int] = {}
        self._others: set[str] = set()

    def skip(self, folder: Path) -> None:
        """Skip existing lines, which an earlier server process recorded."""
        for path in trace_files(folder):
            self._read[path] = path.stat().st_size

    def read(self, folder: Path, dropped: Counter[str]) -> None:
        """Add new lines, and to ``dropped`` the records that processes report as not written.

        An incomplete last line of a file is read once it is complete.
        """
        paths = trace_files(folder)
        for path in paths:
            try:
                # A run has a file for each process that ever recorded; nearly all of them no longer grow.
                if self._read.get(path, 0) != path.stat().st_size <= FOREIGN_BYTES:
                    with open(path, "rb", opener=regular_opener) as file:
                        self._read_on(path, file, dropped)
            except OSError:  # the budget removed it, or the run's own code replaced it
                continue
        for gone in [path for path in self._read if path.parent == folder and path not in paths]:
            del self._read[gone]

    def _read_on(self, path: Path, file: BinaryIO, dropped: Counter[str]) -> None:
        size, offset = path.stat().st_size, self._read.get(path, 0)
        if size < offset:  # its spans were removed; it is closed, and was read to its end before
            self._read[path] = size
        if size <= offset:
            return
        file.seek(offset)
        for num_bytes, line in bounded_lines(file):
            if line.endswith(b"\n"):
                self._read[path] = offset = offset + num_bytes
                self._take(line, dropped)

    def _take(self, line: bytes, dropped: Counter[str]) -> None:
        try:
            if line.startswith(b'{"kind":"rollout"'):
                for phase, ns in _decode_summary(line).phases.items():
                    self.seconds[self._name(phase)] += max(0, ns) / _NS
            elif line.startswith(b'{"kind":"dropped"'):
                lost = _decode_dropped(line)
                dropped.update(spans=lost.spans, summaries=lost.summaries)
        except (msgspec.DecodeError, ValueError):  # a broken line: the profile report names it
            return

    def _name(self, phase: str) -> str:
        if phase in PHASES or phase in self._others:
            return phase
        if len(self._others) >= MAX_OTHER_PHASES:
            return OTHER
        self._others.add(phase)
        return phase
