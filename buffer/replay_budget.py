"""How many bytes are stored for replays alone, and how many may be."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from forebay.buffer.retention_rules import Keep, SegmentVerdict, oldest_kept
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Segment

UNNEEDED = frozenset({Keep.REPLAYABLE, Keep.KEPT})


class _RunMark(NamedTuple):
    """What of a run decides whether bodies that nobody needed are needed now. Checkpoints only ever move on, or back by
    a rewind."""

    buffer: RunBuffer
    keeps_bodies: bool
    oldest_step: int

    def is_as_good_as(self, other: "_RunMark") -> bool:
        is_same = self.buffer is other.buffer and self.keeps_bodies == other.keeps_bodies
        return is_same and self.oldest_step >= other.oldest_step


class ReplayBudget:
    """What was found of each closed segment. Those that nobody but a replay needs are not looked at again each time.

    With a full budget that are nearly all of them: a hundred thousand groups, whose rows are in the index alone. What
    is known may be out of date by a rewind and the checkpoints after it; each segment is judged anew before it goes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes: dict[int, int] = {}
        self._unneeded: dict[int, dict[str, _RunMark]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of bodies that nobody but a replay needs."""
        return sum(self._num_bytes.values())

    @property
    def is_exceeded(self) -> bool:
        """Whether some of them must go."""
        return self.num_bytes > self.max_bytes

    def note(self, segment: Segment, verdict: SegmentVerdict, buffers: Mapping[str, RunBuffer]) -> None:
        """What was found of all bodies in a segment."""
        self.forget(segment.number)
        self._num_bytes[segment.number] = verdict.kept[Keep.REPLAYABLE]
        if verdict.kept and verdict.kept.keys() <= UNNEEDED:
            run_ids = {bodies.run_id for bodies in segment.groups}
            self._unneeded[segment.number] = {run_id: _mark(buffers[run_id]) for run_id in run_ids}

    def forget(self, number: int) -> None:
        """A segment has gone."""
        self._num_bytes.pop(number, None)
        self._unneeded.pop(number, None)

    def knows(self, number: int, buffers: Mapping[str, RunBuffer], sources: Collection[str]) -> bool:
        """Whether a segment needs no other look: nobody needed what it holds, and none of its runs went back since."""
        marks = self._unneeded.get(number, {})
        if not marks or any(run_id in sources or run_id not in buffers for run_id in marks):
            return False
        return all(_mark(buffers[run_id]).is_as_good_as(mark) for run_id, mark in marks.items())


def _mark(buffer: RunBuffer) -> _RunMark:
    oldest = oldest_kept(buffer)
    return _RunMark(buffer, buffer.run.settings.keep_bodies, -1 if oldest is None else oldest.step)
