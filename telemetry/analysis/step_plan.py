"""Decides which reads make a step, when it begins and ends, and which groups belong to it.

A step is named by its reads' ``step``, else by the checkpoint that holds their batches, else by the weights that made
them. Without any of these, each read is a step. A step lasts from the last byte of the previous step to its own.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.telemetry.analysis.intervals import union
from forebay.telemetry.analysis.timeline import NS, SharedEngine, Standstill
from forebay.telemetry.attempts import TraceLine
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.records import (
    BatchChange,
    Dropped,
    GroupChange,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    RolloutSummary,
    SharedEngines,
)


@dataclass(slots=True)
class GroupLife:
    """The life of a group. Times in ns, 0 if unset."""

    begun: int = 0
    """First begin and last end (``ended``) among the records of its rollouts."""
    ended: int = 0
    ready: int = 0
    ready_by: str = ""
    discarded: int = 0
    discarded_why: str = ""
    is_known: bool = False
    """Whether the server recorded anything about it."""
    is_delivered: bool = False


class TraceIndex:
    """All records outside rollouts, and when groups were alive and engines busy."""

    def __init__(self, db: TraceDB) -> None:
        self.groups = {name: GroupLife(begin, end) for name, begin, end in db.groups()}
        self.reads: dict[str, Read] = {}
        """By id: a copied file repeats them."""
        self.open_reads: dict[str, int] = {}
        """By id, the begin of each read that had not ended when the log ended."""
        self.checkpoints: dict[str, int] = {}
        """By batch."""
        self.shared: list[SharedEngine] = []
        self.dropped: list[Dropped] = []
        self.num_failures = 0
        """How often its run process ended before its work was done."""
        self.last_ns = db.last_ns
        self._stalls: dict[tuple[str, int, int], Standstill] = {}
        for line in db.of_run():
            self._see(line)
        self.standstills = sorted(self._stalls.values(), key=lambda stall: stall.begin_s)
        self.busy = _busy_engines(db)
        """By engine: when it had any request."""
        begun = [group.begun for group in self.groups.values() if group.begun]
        self.first_ns = min([*begun, *(read.t for read in self.reads.values())], default=0)

    def _see(self, line: TraceLine) -> None:
        match record := line.record:
            case Open(name="read" | "delivery"):
                self.open_reads[record.id] = record.t
            case GroupChange():
                self._see_group(record)
            case Read():
                self.open_reads.pop(record.id, None)
                self.reads.setdefault(record.id, record)
            case BatchChange(checkpoint=int(checkpoint)):
                self.checkpoints[record.batch] = checkpoint
            case SharedEngines():
                if self.shared:
                    self.shared[-1].end_s = min(self.shared[-1].end_s, record.t * NS)
                if record.engines:
                    self.shared.append(SharedEngine(record.t * NS, self.last_ns * NS, record.engines, record.runs))
            case LoopStall():
                # Recorded while it lasts and again at its end, which comes last.
                process, key = line.writer.process, (line.writer.process, line.writer.pid, record.t)
                stack = record.stack or (self._stalls[key].stack if key in self._stalls else [])
                self._stalls[key] = Standstill(process, record.t * NS, (record.t + record.d) * NS, stack)
            case ProcessChange(what="failed") if record.process:
                self.num_failures += 1
            case Dropped():
                self.dropped.append(record)

    def _see_group(self, record: GroupChange) -> None:
        group = self.groups.setdefault(record.group, GroupLife())
        group.is_known = True
        if record.state == "discarded":
            group.discarded, group.discarded_why = record.t, record.reason
        elif record.state == "ready" and not group.ready:
            # After a rewind or an expiry a group is ready again; a step waited only for the first time.
            group.ready, group.ready_by = record.t, record.last


def _busy_engines(db: TraceDB) -> dict[str, list[tuple[int, int]]]:
    """By engine: when it had any request, in ns."""
    times: dict[str, array[int]] = {}
    for line in db.summaries():
        if isinstance(line.record, RolloutSummary) and line.record.engine:
            own = times.setdefault(line.record.engine, array("q"))
            own.extend((line.record.t, line.record.t + line.record.d))
    return {engine: union(zip(flat[::2], flat[1::2], strict=True)) for engine, flat in times.items()}


@dataclass(slots=True)
class StepPlan:
    """A step before its rollouts are read. Times in ns."""

    name: str
    reads: list[Read] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    groups: list[str] = field(default_factory=list)
    """Groups that were delivered to it or discarded during it."""


def plan_steps(index: TraceIndex) -> tuple[list[StepPlan], list[str]]:
    """All steps of a trace ordered by end, and the groups that belong to no step.

    Leftover groups have rollouts that were still running or waiting when the last step ended. If no read delivered
    anything, the trace has no steps, and all groups are left over.
    """
    reads = [read for read in index.reads.values() if read.groups and end_of(read)]
    reads.sort(key=lambda read: read.t)
    steps = _named_steps(reads, _naming(reads, index.checkpoints), index)
    for step in steps:
        step.end = max(end_of(read) for read in step.reads)
    steps.sort(key=lambda step: step.end)
    begin = index.first_ns
    for step in steps:
        step.begin, begin = min(begin, step.end), step.end
    return steps, _spread_others(steps, index)


def satisfied_of(read: Read) -> int:
    """When its groups were ready."""
    return read.satisfied or read.judged or read.first_byte or read.sent


def end_of(read: Read) -> int:
    """When its last byte was sent; if the client disconnected, the latest known time."""
    return read.sent or read.first_byte or read.judged or read.satisfied


def _naming(reads: Sequence[Read], checkpoints: dict[str, int]) -> Callable[[int, Read], str]:
    """How to name reads: by the first of three numbers that most of them have. The others are named by position."""
    tellers: tuple[Callable[[Read], int | None], ...] = (
        lambda read: read.step,
        lambda read: checkpoints.get(read.batch),
        lambda read: read.weights,
    )
    for tell in tellers:
        if 2 * sum(tell(read) is not None for read in reads) > len(reads):
            return lambda number, read: f"read {number}" if tell(read) is None else str(tell(read))
    return lambda number, _: str(number)


def _named_steps(reads: Sequence[Read], name_of: Callable[[int, Read], str], index: TraceIndex) -> list[StepPlan]:
    """One step for each name; another one when groups are delivered again, after a rewind or an expiry."""
    steps: list[StepPlan] = []
    latest: dict[str, list[StepPlan]] = {}
    for number, read in enumerate(reads):
        plain = name_of(number, read)
        known = latest.setdefault(plain, [])
        lives = {group: index.groups.setdefault(group, GroupLife()) for group in read.groups}
        fresh = [group for group in read.groups if not lives[group].is_delivered]
        if not known or _comes_again(read, fresh, known):
            known.append(StepPlan(f"{plain} ({len(known) + 1})" if known else plain))
            steps.append(known[-1])
        known[-1].reads.append(read)
        known[-1].groups += fresh
        for life in lives.values():
            life.is_delivered = True
    return steps


def _comes_again(read: Read, fresh: Sequence[str], known: Sequence[StepPlan]) -> bool:
    """Whether the trainer repeats this step after a rewind."""
    if len(fresh) == len(read.groups):
        return False
    return len(known) == 1 or any(not set(before.groups).isdisjoint(read.groups) for before in known[-1].reads)


def _spread_others(steps: Sequence[StepPlan], index: TraceIndex) -> list[str]:
    """Assign each undelivered group to the step during which it ended or was discarded; return the rest."""
    ends = [step.end for step in steps]
    left_over = []
    for name, group in index.groups.items():
        if group.is_delivered or not (group.ended or group.ready):
            continue
        has_ended = group.discarded or not (group.is_known or group.ready)
        number = bisect_left(ends, group.discarded or group.ended) if has_ended else len(steps)
        if number < len(steps):
            steps[number].groups.append(name)
        else:
            left_over.append(name)
    return left_over
