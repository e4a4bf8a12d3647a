"""Why stored bodies are kept. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import GroupBodies
from forebay.buffer.store.rows import BatchRow, GroupRow
from forebay.core.group import GroupState


class Keep(StrEnum):
    """Why a body is kept (docs/storage.md explains each)."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    UNCHECKPOINTED = "uncheckpointed"
    """Delivered, and no checkpoint holds it: a rewind to the last one brings it back."""
    CHECKPOINTED = "checkpointed"
    """One of the last checkpoints holds it."""
    RECENT = "recent"
    """Of no use to the trainer, and newer than the oldest of the last checkpoints."""
    IN_BUDGET = "in_budget"
    """Its run has no checkpoints, and there is room."""
    UNKNOWN = "unknown"
    """Of a run that is not known."""


FIXED = frozenset({Keep.OPEN, Keep.LEASED, Keep.UNKNOWN})
"""Bodies that cannot be moved either: somebody may be adding to their group, or sending it."""


class SegmentVerdict(NamedTuple):
    """What of a segment is kept."""

    kept: Counter[Keep]
    """Bytes, by reason."""
    moved: list[tuple[str, str]]
    """The groups, with their runs, that are kept."""

    @property
    def is_fixed(self) -> bool:
        """Whether the segment must stay."""
        return bool(self.kept.keys() & FIXED)


class LookedUp(NamedTuple):
    """What memory had not, each by its run and its id."""

    groups: Mapping[tuple[str, str], GroupRow]
    batches: Mapping[tuple[str, str], BatchRow]
    """Those that have such groups, or others that were asked about."""


class Keeper:
    """Judges by what runs are at this moment; another moment needs another keeper."""

    def __init__(self, buffers: Mapping[str, RunBuffer], gone: LookedUp, *, has_room: bool) -> None:
        """``has_room`` keeps what would only go for want of it; ``gone`` is what memory may not have."""
        self._runs = {run_id: _RunKeeper(buffer, gone) for run_id, buffer in buffers.items()}
        self._has_room = has_room

    def judge(self, groups: Iterable[GroupBodies], at_most: float = math.inf) -> SegmentVerdict:
        """What must be kept of a segment with these bodies; not all of it if it is more than ``at_most`` bytes."""
        verdict = SegmentVerdict(Counter(), [])
        for each in groups:
            run = self._runs.get(each.run_id)
            reason = run.reason(each) if run else Keep.UNKNOWN
            if reason is not None and (self._has_room or reason is not Keep.IN_BUDGET):
                verdict.kept[reason] += each.num_bytes
                verdict.moved.append((each.run_id, each.group_id))
                # More than that is not moved anyway, and a segment may hold a hundred thousand groups.
                if verdict.kept.total() > at_most:
                    break
        return verdict


class _RunKeeper:
    def __init__(self, buffer: RunBuffer, gone: LookedUp) -> None:
        batches = buffer.batches
        self._gone = gone
        last = batches.checkpoints[-buffer.run.settings.keep_checkpoints :]
        self._groups = buffer.groups.by_id
        self._batches = batches.by_id
        self._uses_checkpoints = batches.uses_checkpoints
        # With fewer checkpoints than are to be kept, all of them count.
        is_full = len(last) == buffer.run.settings.keep_checkpoints
        self._oldest_step = last[0].step if is_full else -1
        self._oldest_at_s = last[0].at_s if is_full else 0.0

    def reason(self, bodies: GroupBodies) -> Keep | None:
        """Why bodies are kept; None if nobody can ask for them any more."""
        group = self._groups.get(bodies.group_id)
        # A late or surplus sample may name a group that never was.
        row = group.row if group is not None else self._gone.groups.get((bodies.run_id, bodies.group_id))
        state = GroupState.DISCARDED if row is None else row.state
        if state in (GroupState.OPEN, GroupState.READY, GroupState.LEASED):
            return Keep(state.value)
        if not self._uses_checkpoints:
            return Keep.IN_BUDGET
        if row is None or state is GroupState.DISCARDED:
            return None if bodies.newest_at_s < self._oldest_at_s else Keep.RECENT
        batch = self._batches.get(row.batch_id) or self._gone.batches.get((bodies.run_id, row.batch_id))
        if batch is None or batch.checkpoint_step is None:
            return Keep.UNCHECKPOINTED
        return None if batch.checkpoint_step < self._oldest_step else Keep.CHECKPOINTED
