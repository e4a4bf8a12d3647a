"""What is replayed, whatever it lies in: a run of this server's journal, or an exported file."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord


class Source(Protocol):
    """A recording, read group by group. Nothing of it changes while it is read."""

    @property
    def run(self) -> RunRecord:
        """What it is a recording of."""
        ...

    async def groups(self) -> Sequence[GroupRecord]:
        """Every group, in the order in which they opened."""
        ...

    async def batches(self) -> Sequence[BatchRecord]:
        """Every batch, those that were revoked too, in the order of their numbers."""
        ...

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[SampleRecord]]:
        """By group, every sample that names it, late and surplus ones too, in the order in which they came.

        Raises ``RecordingDamaged`` where a file does not have all of them any more; the other groups can be asked for.
        """
        ...

    def has_body(self, sample: SampleRecord) -> bool:
        """Whether its body is still there; retention removes those of a journal."""
        ...

    async def bodies(self, samples: Sequence[SampleRecord]) -> Sequence[bytes]:
        """Their bodies as they were stored, in that order.

        Raises ``StorageFailed`` (``BodyUnreadable``, ``RecordingDamaged``) for one that is gone or damaged.
        """
        ...

    def left_out(self) -> Mapping[str, str]:
        """By id, the groups of a file whose samples could not be read when it was exported, and why."""
        return {}

    def damage(self) -> Sequence[str]:
        """What ``groups`` and ``batches`` had to leave out of what they gave: rows of a file that are damaged."""
        return ()
