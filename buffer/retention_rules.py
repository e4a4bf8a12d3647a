"""Why stored bodies are kept, and how many are kept for replays alone. Pure."""

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import GroupBodies, Segment
from forebay.core.group import GroupState
from forebay.core.records.rows import BatchRow, CheckpointRow, GroupRow


class Keep(StrEnum):
    """Why a body is kept (docs/storage.md explains each)."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    UNCHECKPOINTED = "uncheckpointed"
    """Delivered but in no checkpoint: a rewind to the last checkpoint restores it."""
    CHECKPOINTED = "checkpointed"
    """In one of the last checkpoints."""
    RECENT = "recent"
    """Discarded, but newer than the oldest of the last checkpoints."""
    IN_BUDGET = "in_budget"
    """Its run has no checkpoints, and the byte budget has room."""
    REPLAYABLE = "replayable"
    """Only a replay can use it."""
    KEPT = "kept"
    """Only a replay can use it, and its run keeps all of its bodies."""
    SOURCE = "source"
    """Its run is being replayed."""
    UNKNOWN = "unknown"
    """Its run is unknown."""


FIXED = frozenset({Keep.OPEN, Keep.LEASED, Keep.SOURCE, Keep.UNKNOWN})
"""Bodies that cannot be moved either: their group may be growing, or they are being sent or read."""
FOR_REPLAYS = frozenset({Keep.REPLAYABLE})
"""Reasons overridden to satisfy ``replay_bytes``. A replay needs no parts."""
FOR_WANT_OF_ROOM = frozenset({Keep.REPLAYABLE, Keep.KEPT, Keep.IN_BUDGET})
"""Reasons overridden to satisfy ``max_journal_bytes``."""
UNNEEDED = frozenset({Keep.REPLAYABLE, Keep.KEPT})
"""Reasons for bodies that only a replay needs."""


class SegmentVerdict(NamedTuple):
    """What must be kept of a segment."""

    kept: Counter[Keep]
    """Bytes, by reason."""
    moved: list[tuple[str, str]]
    """The kept groups, as pairs of run id and group id."""
    bare: set[tuple[str, str]]
    """Those of them whose parts are not kept."""

    @property
    def is_fixed(self) -> bool:
        """Whether the segment must stay."""
        return bool(self.kept.keys() & FIXED)


class LookedUp(NamedTuple):
    """Rows that memory lacked, by run id and own id."""

    groups: Mapping[tuple[str, str], GroupRow]
    batches: Mapping[tuple[str, str], BatchRow]
    """Batches of these groups, or others that were looked up."""


class RetentionSnapshot:
    """Judges bodies by the current state of the runs; make a new snapshot for each moment."""

    def __init__(
        self,
        buffers: Mapping[str, RunBuffer],
        gone: LookedUp,
        sources: Container[str] = (),
        given_up: frozenset[Keep] = frozenset(),
    ) -> None:
        """``gone``: rows that memory may lack; ``sources``: runs being replayed; ``given_up``: reasons overridden."""
        self._runs = {run_id: _RunKeeper(buffer, gone, run_id in sources) for run_id, buffer in buffers.items()}
        self._given_up = given_up

    def judge(self, groups: Iterable[GroupBodies], at_most: float = math.inf) -> SegmentVerdict:
        """Decide what must be kept of a segment with these bodies; stops once that exceeds ``at_most`` bytes."""
        verdict = SegmentVerdict(Counter(), [], set())
        for each in groups:
            run = self._runs.get(each.run_id)
            reason = run.reason(each) if run else Keep.UNKNOWN
            if reason not in self._given_up:
                verdict.kept[reason] += each.num_bytes
                verdict.moved.append((each.run_id, each.group_id))
                if reason in FOR_REPLAYS and each.part_bytes:
                    verdict.kept[reason] -= each.part_bytes
                    verdict.bare.add((each.run_id, each.group_id))
                # A larger result means that nothing is moved, and a segment may hold a hundred thousand groups.
                if verdict.kept.total() > at_most:
                    break
        return verdict


def oldest_kept(buffer: RunBuffer) -> CheckpointRow | None:
    """The oldest of the last checkpoints; None while the run has fewer than it keeps: then none is too old."""
    num_kept = buffer.run.settings.keep_checkpoints
    last = buffer.batches.checkpoints[-num_kept:]
    return last[0] if len(last) == num_kept else None


class _RunKeeper:
    def __init__(self, buffer: RunBuffer, gone: LookedUp, is_source: bool) -> None:
        batches = buffer.batches
        self._gone = gone
        self._is_source = is_source
        self._groups = buffer.groups.by_id
        self._batches = batches.by_id
        self._uses_checkpoints = batches.uses_checkpoints
        self._unneeded = Keep.KEPT if buffer.run.settings.keep_bodies else Keep.REPLAYABLE
        oldest = oldest_kept(buffer)
        self._oldest_step = oldest.step if oldest else -1
        self._oldest_at_s = oldest.at_s if oldest else 0.0

    def reason(self, bodies: GroupBodies) -> Keep:
        """Return why these bodies are kept."""
        if self._is_source:
            return Keep.SOURCE
        group = self._groups.get(bodies.group_id)
        # A late or surplus sample may name a group that never existed.
        row = group.row if group is not None else self._gone.groups.get((bodies.run_id, bodies.group_id))
        state = GroupState.DISCARDED if row is None else row.state
        if state in (GroupState.OPEN, GroupState.READY, GroupState.LEASED):
            return Keep(state.value)
        if not self._uses_checkpoints:
            return Keep.IN_BUDGET
        if row is None or state is GroupState.DISCARDED:
            return self._unneeded if bodies.newest_at_s < self._oldest_at_s else Keep.RECENT
        batch = self._batches.get(row.batch_id) or self._gone.batches.get((bodies.run_id, row.batch_id))
        if batch is None or batch.checkpoint_step is None:
            return Keep.UNCHECKPOINTED
        return self._unneeded if batch.checkpoint_step < self._oldest_step else Keep.CHECKPOINTED


class _RunMark(NamedTuple):
    """The run state that decides whether unneeded bodies become needed. Only a rewind moves checkpoints
    backwards."""

    buffer: RunBuffer
    keeps_bodies: bool
    oldest_step: int

    def is_as_good_as(self, other: "_RunMark") -> bool:
        is_same = self.buffer is other.buffer and self.keeps_bodies == other.keeps_bodies
        return is_same and self.oldest_step >= other.oldest_step


class ReplayBudget:
    """What each closed segment holds. Segments that only replays need are not examined every time.

    With a full budget nearly all segments are such: a hundred thousand groups, whose rows are only in the index. A
    rewind and later checkpoints can make this information stale, so each segment is judged again before its removal.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes: dict[int, int] = {}
        self._unneeded: dict[int, dict[str, _RunMark]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of bodies that only a replay needs."""
        return sum(self._num_bytes.values())

    @property
    def is_exceeded(self) -> bool:
        """Whether some of them must be removed."""
        return self.num_bytes > self.max_bytes

    def note(self, segment: Segment, verdict: SegmentVerdict, buffers: Mapping[str, RunBuffer]) -> None:
        """Record the verdict about all bodies in a segment."""
        self.forget(segment.number)
        self._num_bytes[segment.number] = verdict.kept[Keep.REPLAYABLE]
        if verdict.kept and verdict.kept.keys() <= UNNEEDED:
            run_ids = {bodies.run_id for bodies in segment.groups}
            self._unneeded[segment.number] = {run_id: _mark(buffers[run_id]) for run_id in run_ids}

    def forget(self, number: int) -> None:
        """Drop a removed segment."""
        self._num_bytes.pop(number, None)
        self._unneeded.pop(number, None)

    def knows(self, number: int, buffers: Mapping[str, RunBuffer], sources: Collection[str]) -> bool:
        """Whether a segment need not be examined: only replays needed it, and none of its runs was rewound since."""
        marks = self._unneeded.get(number, {})
        if not marks or any(run_id in sources or run_id not in buffers for run_id in marks):
            return False
        return all(_mark(buffers[run_id]).is_as_good_as(mark) for run_id, mark in marks.items())


def _mark(buffer: RunBuffer) -> _RunMark:
    oldest = oldest_kept(buffer)
    return _RunMark(buffer, buffer.run.settings.keep_bodies, -1 if oldest is None else oldest.step)
