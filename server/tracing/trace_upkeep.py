"""What is done for traces from time to time, in a thread: their budget, files of runs that are over, their numbers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Self

from forebay.core.tasks import TaskSet
from forebay.server.tracing.run_traces import AllRuns, RunTrace, RunTraces
from forebay.server.tracing.trace_tail import TraceTail
from forebay.telemetry.tracing.loop_watch import LoopWatch
from forebay.telemetry.tracing.trace_budget import enforce_budget

EVERY_S = 5.0
IDLE_S = 10.0
"""The files of a run that has ended are closed so long after its last record."""

logger = logging.getLogger(__name__)


class TraceUpkeep:
    """Looks after all traces while the server runs. Enter it with ``async with`` before any run is loaded."""

    def __init__(self, traces: RunTraces, every_s: float = EVERY_S) -> None:
        self._traces = traces
        self._every_s = every_s
        self._tail = TraceTail()
        self._looking = asyncio.Lock()
        self._tasks = TaskSet()
        self._watch = LoopWatch()

    async def __aenter__(self) -> Self:
        self._watch.start(AllRuns(self._traces))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.stop()
        await self._tasks.cancel()
        for trace in self._traces.all:
            trace.reads.flush()
        await asyncio.to_thread(self._rest_all)

    async def begin(self) -> None:
        """Runs are loaded, and none has a process yet: what their traces hold is of an earlier life of the server."""
        folders = [self._traces.folder_of(trace.run.run_id) for trace in self._traces.all]
        await asyncio.to_thread(self._skip, folders)
        self._tasks.start(self._keep_looking())

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of the rollouts of all runs since the server started, by phase."""
        # A copy, in one step: a thread may be adding to it.
        return dict(self._tail.seconds)

    @property
    def dropped(self) -> Counter[str]:
        """Spans and summaries that no trace has, of all runs since the server started."""
        return sum((trace.dropped for trace in self._traces.all), Counter())

    async def look(self) -> None:
        """Do all of it once."""
        async with self._looking:
            now_s = monotonic()
            for run_id, trace in list(self._traces.busy.items()):
                is_over = trace.run.has_ended and now_s - trace.last_record_s > IDLE_S
                if is_over:
                    trace.reads.flush()
                    self._traces.busy.pop(run_id, None)
                await asyncio.to_thread(self._look_at, trace, is_over)

    async def read_on(self) -> None:
        """Bring the numbers up to date."""
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
        except OSError as error:  # a full disk, of which the log tells already; others' traces have their turn
            logger.debug("the trace of run %s is not kept to its budget for now: %s", trace.run.run_id, error)
        else:
            trace.dropped.update(spans=removed.spans, summaries=removed.summaries)

    def _read(self, trace: RunTrace) -> None:
        try:
            self._tail.read(self._traces.folder_of(trace.run.run_id), trace.dropped)
        except OSError as error:
            logger.debug("the trace of run %s cannot be read just now: %s", trace.run.run_id, error)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.look()
            except Exception:  # tracing costs nothing but itself
                logger.exception("traces are not looked after for now")
