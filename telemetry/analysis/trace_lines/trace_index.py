"""What is kept of all lines of a trace while its steps are gone over: what is about no rollout, and of each group where
its lines are. A step's spans are read again when it is its turn.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay.telemetry.analysis.timeline import Problem, Standstill
from forebay.telemetry.analysis.trace_lines.trace_sources import OFFSET_BITS, TraceSources, Writer
from forebay.telemetry.tracing.records import (
    BatchChange,
    Dropped,
    GroupChange,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    Record,
    RolloutSummary,
    Span,
    Weights,
)

MAX_PROBLEMS = 100
NS = 1e-9


@dataclass(slots=True)
class GroupLines:
    """One group: where its lines are, and its life as far as a step's bounds need it. Times in ns, 0 for none."""

    offsets: "array[int]" = field(default_factory=lambda: array("I"))
    """Of its lines, one writer's after the other's."""
    runs: "array[int]" = field(default_factory=lambda: array("I"))
    """Pairs: from which of ``offsets`` on they are of which writer."""
    begun: int = 0
    ended: int = 0
    """Of what its lines tell: the end of the last."""
    ready: int = 0
    ready_by: str = ""
    discarded: int = 0
    discarded_why: str = ""
    is_known: bool = False
    """Whether the server said anything of it."""
    is_delivered: bool = False

    def add_line(self, writer: int, offset: int) -> None:
        """Note one more line."""
        runs = self.runs
        if not runs or runs[-1] != writer:
            runs.append(len(self.offsets))
            runs.append(writer)
        self.offsets.append(offset)

    def lines(self) -> Iterator[int]:
        """Of all lines: the number of its writer, and in the low bits its offset."""
        firsts = self.runs[::2]
        ends = [*firsts, len(self.offsets)][1:]
        for first, writer, end in zip(firsts, self.runs[1::2], ends, strict=True):
            place = writer << OFFSET_BITS
            for offset in self.offsets[first:end]:
                yield place | offset


class TraceIndex:
    """Made in one pass over all lines."""

    def __init__(self, sources: TraceSources) -> None:
        self.sources = sources
        self.groups: dict[str, GroupLines] = {}
        self.reads: list[Read] = []
        self.open_reads: dict[str, int] = {}
        """Since when a read waits that was not over when the log ended, by its id."""
        self.checkpoints: dict[str, int] = {}
        """By batch."""
        self.standstills: list[Standstill] = []
        self.busy: dict[str, array[int]] = {}
        """By engine: begin and end of each request, one after the other."""
        self.problems: list[Problem] = []
        self.num_problems = 0
        self.num_rollouts = 0
        self.dropped_spans = 0
        self.dropped_summaries = 0
        self.dropped_why: set[str] = set()
        self.first_ns = 0
        self.last_ns = 0
        self.num_failures = 0
        """How often its run process ended before its work was done."""
        self._process_ends: list[tuple[int, str]] = []
        self._read_ids: set[str] = set()
        self._of_uid: dict[str, str] = {}
        """The group of a rollout of which there are lines that do not name it."""
        self._nameless: dict[str, GroupLines] = {}
        self._stalls: dict[tuple[str, int, int], LoopStall] = {}
        self._scan()

    def _scan(self) -> None:
        handlers: dict[type, Any] = {
            Span: self._see_lasting,
            Open: self._see_open,
            RolloutSummary: self._see_summary,
            GroupChange: self._see_group,
            Read: self._see_read,
            BatchChange: self._see_batch,
            LoopStall: self._see_stall,
            ProcessChange: self._see_process,
            Dropped: self._see_dropped,
            Weights: _skip,
        }
        for offset, writer, record in self.sources.scan(self._leave_out):
            begin: int = record.t + writer.shift_ns  # type: ignore[union-attr]  # heads do not come here
            if begin > writer.last_ns:
                writer.last_ns = begin
            handlers.get(type(record), _skip)(offset, writer, record, begin)
        self._name_groups()
        self._end()

    def _leave_out(self, file: str, line: int, what: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(file, line, what))

    def _see_lasting(self, offset: int, writer: Writer, record: Span | Open, begin: int, d: int = 0) -> None:
        if not record.uid:
            return
        end = begin + (record.d if record.__class__ is Span else d)
        if end > writer.last_ns:
            writer.last_ns = end
        if not record.group:
            group = self._nameless.get(record.uid)
            if group is None:
                group = self._nameless[record.uid] = GroupLines()
        else:
            group = self.groups.get(record.group)
            if group is None:
                group = self.groups[record.group] = GroupLines()
        group.add_line(writer.number, offset)
        if end > group.ended:
            group.ended = end
        if begin < group.begun or not group.begun:
            group.begun = begin

    def _see_open(self, offset: int, writer: Writer, record: Open, begin: int) -> None:
        if record.uid:
            self._see_lasting(offset, writer, record, begin)
        elif record.name in ("read", "delivery"):
            self.open_reads[record.id] = begin

    def _see_summary(self, offset: int, writer: Writer, record: RolloutSummary, begin: int) -> None:
        self.num_rollouts += 1
        self._of_uid_seen(record)
        self._see_lasting(offset, writer, record, begin, record.d)  # type: ignore[arg-type]  # as long as it has a d
        if record.engine:
            busy = self.busy.setdefault(record.engine, array("q"))
            busy.append(begin)
            busy.append(begin + record.d)

    def _of_uid_seen(self, record: RolloutSummary) -> None:
        if record.uid in self._nameless:
            self._of_uid[record.uid] = record.group

    def _see_group(self, _offset: int, _writer: Writer, record: GroupChange, begin: int) -> None:
        group = self.groups.setdefault(record.group, GroupLines())
        group.is_known = True
        if record.state == "ready":
            # After a rewind or an expiry a group is ready anew; what a step waited for is that it was so at all.
            if not group.ready:
                group.ready, group.ready_by = begin, record.last
        elif record.state == "discarded":
            group.discarded, group.discarded_why = begin, record.reason

    def _see_read(self, _offset: int, writer: Writer, record: Read, begin: int) -> None:
        self.open_reads.pop(record.id, None)
        if record.id in self._read_ids:  # of a file that was copied
            return
        self._read_ids.add(record.id)
        shift = writer.shift_ns
        if shift:
            record.t = begin
            for name in ("last_asked", "satisfied", "judged", "first_byte", "sent"):
                if getattr(record, name):
                    setattr(record, name, getattr(record, name) + shift)
        writer.last_ns = max(writer.last_ns, record.satisfied, record.sent)
        self.reads.append(record)

    def _see_batch(self, _offset: int, _writer: Writer, record: BatchChange, _begin: int) -> None:
        if record.checkpoint is not None:
            self.checkpoints[record.batch] = record.checkpoint

    def _see_stall(self, _offset: int, writer: Writer, record: LoopStall, begin: int) -> None:
        # Noted while it lasts and again when it has ended: the longest note has it all.
        key = (writer.process, writer.pid, begin)
        known = self._stalls.get(key)
        if known is None or record.d >= known.d:
            record.stack = record.stack or (known.stack if known else [])
            self._stalls[key] = record

    def _see_process(self, _offset: int, _writer: Writer, record: ProcessChange, begin: int) -> None:
        if record.process and record.what in ("failed", "ended"):
            self._process_ends.append((begin, record.process))
            self.num_failures += record.what == "failed"

    def _see_dropped(self, _offset: int, _writer: Writer, record: Dropped, _begin: int) -> None:
        self.dropped_spans += record.spans
        self.dropped_summaries += record.summaries
        if record.why:
            self.dropped_why.add(record.why)

    def _name_groups(self) -> None:
        """Give the lines that name a rollout and no group to the group of that rollout."""
        for uid, lines in self._nameless.items():
            name = self._of_uid.get(uid) or _group_in(uid)
            group = self.groups.get(name) or self.groups.setdefault(uid, GroupLines())
            for line in lines.lines():
                group.add_line(line >> OFFSET_BITS, line & ((1 << OFFSET_BITS) - 1))
            group.begun = min(group.begun or lines.begun, lines.begun)
            group.ended = max(group.ended, lines.ended)
        self._nameless.clear()
        self._of_uid.clear()

    def _end(self) -> None:
        for (process, _, begin), stall in self._stalls.items():
            end = begin + stall.d
            self.standstills.append(Standstill(process, begin * NS, end * NS, stall.stack))
        self._stalls.clear()
        self._process_ends.sort()
        for writer in self.sources.writers:
            ends = (at for at, process in self._process_ends if process == writer.process and at >= writer.last_ns)
            writer.ended_ns = next(ends, 0)
        self.standstills.sort(key=lambda each: each.begin_s)
        self.last_ns = max((writer.last_ns for writer in self.sources.writers), default=0)
        self.last_ns = max((self.last_ns, *(group.ended for group in self.groups.values())))
        begun = [group.begun for group in self.groups.values() if group.begun] + [read.t for read in self.reads]
        self.first_ns = min(begun, default=0)

    @property
    def is_empty(self) -> bool:
        """Whether there is not a single record beside heads."""
        return not (self.groups or self.reads or self.open_reads or self.last_ns)

    def records_of(self, groups: list[GroupLines]) -> Iterator[tuple[Writer, Record]]:
        """All lines about these groups, in the order in which they lie on the disk."""
        numbers: list[int] = []
        for group in groups:
            numbers += group.lines()
        numbers.sort()
        yield from self.sources.read(numbers)
        self.sources.forget_pages()


def _group_in(uid: str) -> str:
    """The group that a ``rollout_uid`` names, if it is one."""
    parts = uid.rsplit("-", 2)
    return parts[1] if len(parts) == 3 else uid


def _skip(_offset: int, _writer: Writer, _record: Record, _begin: int) -> None:
    """What no step is made of."""
