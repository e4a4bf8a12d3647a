"""Decides which reads make a step, when it begins and ends, and which groups belong to it.

A step is named by its reads' ``step``, else by the checkpoint that holds their batches, else by the weights that made
them. Without any of these, each read is a step. A step lasts from the last byte of the previous step to its own.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.telemetry.analysis.trace_index import GroupLife, TraceIndex
from forebay.telemetry.tracing.records import Read


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
    reads = [read for read in index.reads if read.groups and end_of(read)]
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
