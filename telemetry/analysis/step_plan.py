"""Which reads make a step, from when to when it goes, and which groups are its own.

A step is what the reads say that they are for (``step``), else the checkpoint that holds their batches, else the
weights that they were made with, else each read. Its window goes from the last byte of the step before to its own.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.telemetry.analysis.trace_index import GroupLife, TraceIndex
from forebay.telemetry.tracing.records import Read


@dataclass(slots=True)
class StepPlan:
    """A step before anything of its rollouts is read. Times in ns."""

    name: str
    reads: list[Read] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    groups: list[str] = field(default_factory=list)
    """Those that it got, and those that were given up while it lasted."""


def plan_steps(index: TraceIndex) -> tuple[list[StepPlan], list[str]]:
    """All steps of a trace, in the order of their ends, and the groups that belong to none of them.

    These are of rollouts that went on, or waited, when the last step had ended. Without a read that brought anything
    there is no step, and all groups are left over.
    """
    reads = [read for read in index.reads if read.groups and end_of(read)]
    reads.sort(key=lambda read: read.t)
    steps = _named_steps(reads, _naming(reads, index.checkpoints), index)
    for step in steps:
        step.end = max(end_of(read) for read in step.reads)
    steps.sort(key=lambda step: step.end)
    _set_begins(steps, index)
    return steps, _spread_others(steps, index)


def satisfied_of(read: Read) -> int:
    """When its groups were there."""
    return read.satisfied or read.judged or read.first_byte or read.sent


def end_of(read: Read) -> int:
    """When its last byte had gone out; of one whose client went away, the last that is known."""
    return read.sent or read.first_byte or read.judged or read.satisfied


def _naming(reads: Sequence[Read], checkpoints: dict[str, int]) -> Callable[[int, Read], str]:
    """How reads are named: by the first of the three that most of them tell, those that do not by their number."""
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
    """One step for each name; another one where groups come again, after a rewind or an expiry."""
    steps: list[StepPlan] = []
    latest: dict[str, list[StepPlan]] = {}
    for number, read in enumerate(reads):
        plain = name_of(number, read)
        known = latest.setdefault(plain, [])
        fresh = [group for group in read.groups if not _group(index, group).is_delivered]
        if not known or _comes_again(read, fresh, known):
            known.append(StepPlan(f"{plain} ({len(known) + 1})" if known else plain))
            steps.append(known[-1])
        known[-1].reads.append(read)
        known[-1].groups += fresh
        for group in fresh:
            _group(index, group).is_delivered = True
    return steps


def _comes_again(read: Read, fresh: Sequence[str], known: Sequence[StepPlan]) -> bool:
    """Whether the trainer is at this step once more, as it is after a rewind."""
    if len(fresh) == len(read.groups):
        return False
    return len(known) == 1 or any(not set(before.groups).isdisjoint(read.groups) for before in known[-1].reads)


def _group(index: TraceIndex, name: str) -> GroupLife:
    return index.groups.setdefault(name, GroupLife())


def _set_begins(steps: Sequence[StepPlan], index: TraceIndex) -> None:
    begin = index.first_ns
    for step in steps:
        step.begin, begin = min(begin, step.end), step.end


def _spread_others(steps: Sequence[StepPlan], index: TraceIndex) -> list[str]:
    """Give each group that no read brought to the step in which it was given up, or ended; return all others."""
    ends = [step.end for step in steps]
    left_over = []
    for name, group in index.groups.items():
        if group.is_delivered or not (group.ended or group.ready):
            continue
        number = bisect_left(ends, _over_at(group))
        if number < len(steps):
            steps[number].groups.append(name)
        else:
            left_over.append(name)
    return left_over


_NEVER = 1 << 63


def _over_at(group: GroupLife) -> int:
    """When it was over; what is known to the server and was neither delivered nor given up is not."""
    if group.discarded:
        return group.discarded
    return _NEVER if group.is_known or group.ready else group.ended
