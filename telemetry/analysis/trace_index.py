"""Indexes a trace: everything except rollouts, and the group data that step bounds need."""

from array import array
from dataclasses import dataclass

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
    """Built in one pass over all records outside rollouts, and one over the summaries."""

    def __init__(self, db: TraceDB) -> None:
        self.groups = {name: GroupLife(begin, end) for name, begin, end in db.groups()}
        self.reads: list[Read] = []
        self.open_reads: dict[str, int] = {}
        """By id, the begin of each read that had not ended when the log ended."""
        self.checkpoints: dict[str, int] = {}
        """By batch."""
        self.standstills: list[Standstill] = []
        self.busy: dict[str, array[int]] = {}
        """By engine: begin and end of each request, one after another."""
        self.shared: list[SharedEngine] = []
        self.dropped_spans = 0
        self.dropped_summaries = 0
        self.dropped_why: set[str] = set()
        self.num_failures = 0
        """How often its run process ended before its work was done."""
        self.last_ns = db.last_ns
        self._read_ids: set[str] = set()
        self._stalls: dict[tuple[str, int, int], LoopStall] = {}
        for line in db.of_run():
            self._see(line)
        for line in db.summaries():
            if isinstance(line.record, RolloutSummary) and line.record.engine:
                own = self.busy.setdefault(line.record.engine, array("q"))
                own.extend((line.record.t, line.record.t + line.record.d))
        for (process, _, begin), stall in sorted(self._stalls.items(), key=lambda item: item[1].t):
            self.standstills.append(Standstill(process, begin * NS, (begin + stall.d) * NS, stall.stack))
        begun = [group.begun for group in self.groups.values() if group.begun] + [read.t for read in self.reads]
        self.first_ns = min(begun, default=0)

    def _see(self, line: TraceLine) -> None:
        match record := line.record:
            case Open(name="read" | "delivery"):
                self.open_reads[record.id] = record.t
            case GroupChange():
                self._see_group(record)
            case Read():
                self.open_reads.pop(record.id, None)
                if record.id not in self._read_ids:  # a copied file repeats it
                    self._read_ids.add(record.id)
                    self.reads.append(record)
            case BatchChange(checkpoint=int(checkpoint)):
                self.checkpoints[record.batch] = checkpoint
            case SharedEngines():
                if self.shared:
                    self.shared[-1].end_s = min(self.shared[-1].end_s, record.t * NS)
                if record.engines:
                    self.shared.append(SharedEngine(record.t * NS, self.last_ns * NS, record.engines, record.runs))
            case LoopStall():
                self._see_stall((line.writer.process, line.writer.pid, record.t), record)
            case ProcessChange(what="failed") if record.process:
                self.num_failures += 1
            case Dropped():
                self.dropped_spans += record.spans
                self.dropped_summaries += record.summaries
                self.dropped_why |= {record.why} - {""}

    def _see_group(self, record: GroupChange) -> None:
        group = self.groups.setdefault(record.group, GroupLife())
        group.is_known = True
        if record.state == "ready":
            # After a rewind or an expiry a group is ready again; a step waited only for the first time.
            if not group.ready:
                group.ready, group.ready_by = record.t, record.last
        elif record.state == "discarded":
            group.discarded, group.discarded_why = record.t, record.reason

    def _see_stall(self, key: tuple[str, int, int], record: LoopStall) -> None:
        # Recorded while it lasts and again at its end: the longest record is complete.
        known = self._stalls.get(key)
        if known is None or record.d >= known.d:
            record.stack = record.stack or (known.stack if known else [])
            self._stalls[key] = record
