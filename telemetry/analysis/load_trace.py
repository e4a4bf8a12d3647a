"""Loads any log as a timeline. For a run's trace: first the bounds of its steps, then the spans of one step at a time.

``step_plan.py`` decides which reads and groups make a step; ``requests.py`` builds requests from attempts.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from os import PathLike
from pathlib import Path

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.intervals import gaps
from forebay.telemetry.analysis.requests import request_of
from forebay.telemetry.analysis.step_plan import StepPlan, TraceIndex, end_of, plan_steps, satisfied_of
from forebay.telemetry.analysis.timeline import NS, ProfileStep, ReadTimes, Request, Timeline
from forebay.telemetry.analysis.verl_log import VerlLog, find_steps
from forebay.telemetry.trace_db import TraceDB, TraceSource
from forebay.telemetry.tracing.read_trace import BadLines, find_trace
from forebay.telemetry.tracing.records import Read


def load(*sources: str | PathLike[str] | TraceSource) -> Timeline:
    """The timeline of a run's trace, or of a folder with verl's log.

    Several sources are parts of one trace: folders, files of a trace, or the lines that
    ``GET /v1/runs/{run_id}/trace`` streams. Raises ``InvalidInput``, which names what was expected, if a folder does
    not exist or has no log, or if the lines contain no record.
    """
    if not sources:
        raise InvalidInput("nothing to load: pass a folder, or the lines of a trace")
    given = [Path(each) if isinstance(each, str | PathLike) else each for each in sources]
    (first, *others) = given
    if isinstance(first, Path) and not others and find_trace(first) is None and find_steps(first):
        return VerlLog(first)
    return TraceTimeline(*given)


class TraceTimeline:
    """The ``Timeline`` of one trace, whose parts may be in several folders, files and streams.

    Only the bounds of all steps and the current step are kept in memory.
    """

    def __init__(self, *sources: TraceSource) -> None:
        """Raises ``InvalidInput`` for a folder without a trace, or if nothing was recorded."""
        self.source = ", ".join(str(each) for each in sources if isinstance(each, Path)) or "a stream of a trace"
        self.problems = BadLines()
        self._db = TraceDB.read(*sources, on_bad_line=self.problems.add)
        if self._db.is_empty:
            raise InvalidInput(f"{self.source} contains no trace records", field="source")
        self._index = TraceIndex(self._db)
        self._steps, self._left_over = plan_steps(self._index)
        self.notes = list(_notes(self._index))

    def steps(self) -> Iterator[ProfileStep]:
        """Steps ordered by end. If rollouts were open, or no read delivered any, the last step has no end."""
        for plan in self._steps:
            yield self._filled(plan)
        if self._left_over:
            yield from self._last()

    def _filled(self, plan: StepPlan) -> ProfileStep:
        step = ProfileStep(plan.name, plan.begin * NS, plan.end * NS)
        _add_reads(step, plan.reads)
        step.requests = self._requests(plan.groups)
        used = {group for read in plan.reads for group in read.groups}
        for request in step.requests:
            request.is_used = request.group in used and request.ending == "finished"
            request.discarded = "" if request.group in used else self._discarded_why(request)
        self._complete(step, dict.fromkeys([*plan.groups, *used]))
        return step

    def _discarded_why(self, request: Request) -> str:
        group = self._index.groups.get(request.group)
        return group.discarded_why if group else ""

    def _requests(self, groups: Iterable[str]) -> list[Request]:
        return sorted(map(request_of, self._db.rollouts(groups)), key=lambda request: request.begin_s)

    def _complete(self, step: ProfileStep, groups: Iterable[str]) -> None:
        """Set what depends on the step's ``groups`` and requests."""
        ready = {name: group for name in groups if (group := self._index.groups[name]).ready}
        step.ready_s = {name: group.ready * NS for name, group in ready.items()}
        step.ready_by = {name: group.ready_by for name, group in ready.items() if group.ready_by}
        delivered = [step.ready_s[name] for read in step.reads for name in read.groups if name in step.ready_s]
        release = max(delivered, default=step.satisfied_s or step.end_s)
        step.worker_phases = self._barriers(step.requests, min(release, step.end_s))
        begin = min((request.begin_s for request in step.requests), default=step.begin_s)
        if delivered and step.asked_s is not None:
            since = max(step.begin_s, release)
            step.idle_s = min((_idle(own, since, step.asked_s) for own in self._index.busy.values()), default=None)
        step.shared = [each for each in self._index.shared if each.end_s > begin and each.begin_s < step.end_s]
        step.standstills = [
            stall for stall in self._index.standstills if stall.end_s >= begin and stall.begin_s <= step.end_s
        ]

    def _barriers(self, requests: Iterable[Request], release_s: float) -> dict[str, dict[str, float]]:
        """By worker of ``requests``: the phase ``barrier_wait``, until ``release_s``."""
        ended: dict[str, float] = {}
        for request in requests:
            if request.worker:
                ended[request.worker] = max(ended.get(request.worker, 0.0), request.end_s)
        busy = self._index.busy
        return {
            worker: {"barrier_wait": _idle(busy.get(worker, []), end_s, release_s)}
            for worker, end_s in sorted(ended.items())
        }

    def _last(self) -> Iterator[ProfileStep]:
        requests = self._requests(self._left_over)
        is_open = any(request.ending == "open" for request in requests) or bool(self._index.open_reads)
        if requests and (is_open or not self._steps):
            yield self._open_step(requests, is_open=is_open)
        elif requests:
            ended = f"{len(requests)} requests of {len(self._left_over)} groups ended after the last read"
            self.notes.append(f"{ended}: they belong to no step.")

    def _open_step(self, requests: list[Request], *, is_open: bool) -> ProfileStep:
        before = self._steps[-1] if self._steps else None
        begin = (before.end if before else self._index.first_ns) * NS
        end = self._index.last_ns * NS if is_open else max(request.end_s for request in requests)
        step = ProfileStep(_name_after(before), min(begin, end), end, requests=requests, is_open=is_open)
        if self._index.open_reads:
            step.asked_s = min(max(min(self._index.open_reads.values()) * NS, step.begin_s), end)
            step.satisfied_s = end
        for request in requests:
            # Nothing has been read yet, so a finished request may still be used, unless its group was discarded.
            request.discarded = self._discarded_why(request)
            request.is_used = request.ending == "finished" and not request.discarded
        self._complete(step, self._left_over)
        return step


def _idle(busy: Sequence[tuple[int, int]], begin_s: float, end_s: float) -> float:
    """Seconds between the two times during which an engine had no request at all."""
    begin, end = round(begin_s / NS), round(end_s / NS)
    first = bisect_left(busy, begin, key=itemgetter(1))
    return sum(right - left for left, right in gaps(begin, end, busy[first:])) * NS


def _name_after(before: StepPlan | None) -> str:
    if before is None:
        return "0"
    return str(int(before.name) + 1) if before.name.isdecimal() else f"after {before.name}"


def _add_reads(step: ProfileStep, reads: Sequence[Read]) -> None:
    step.delivery_phases = {"hooks": 0.0, "write": 0.0, "delivery": 0.0}
    for read in reads:
        satisfied = satisfied_of(read)
        judged = max(read.judged, satisfied)
        sent = max(end_of(read), read.first_byte, judged)
        # If the trainer polls, the hooks run only when it asks again.
        step.delivery_phases["hooks"] += max(0, judged - max(satisfied, read.last_asked)) * NS
        step.delivery_phases["write"] += read.disk * NS
        step.delivery_phases["delivery"] += max(0, sent - judged - read.disk) * NS
        asked = min(read.t, satisfied)
        step.reads.append(ReadTimes(asked * NS, satisfied * NS, sent * NS, by=read.by, groups=read.groups))
    step.asked_s = min(max(min(read.asked_s for read in step.reads), step.begin_s), step.end_s)
    last = max(step.reads, key=lambda read: read.satisfied_s)
    step.satisfied_s, step.released_by = max(last.satisfied_s, step.asked_s), last.by


def _notes(index: TraceIndex) -> Iterator[str]:
    spans, summaries = (sum(getattr(each, what) for each in index.dropped) for what in ("spans", "summaries"))
    if spans or summaries:
        reasons = ", ".join(sorted({each.why for each in index.dropped} - {""}))
        yield f"{spans} spans and {summaries} summaries are missing{f' ({reasons})' if reasons else ''}."
    if index.num_failures:
        times = "once" if index.num_failures == 1 else f"{index.num_failures} times"
        yield f"The run process failed {times}: its unfinished work is shown as open until then."
    if not any(read.groups for read in index.reads.values()):
        yield "No read delivered anything: all is one step, from the first start to the last end."
