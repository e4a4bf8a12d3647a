"""What is replayed, whatever it lies in: a run of this server's journal, or an exported file."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.core.errors import BodyUnreadable
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import BatchRow, GroupRow, SampleRow, StoredSample

Recorded = tuple[SampleRow, bytes]
"""A sample's columns and its body."""


class Source(Protocol):
    """A recording, read group by group. Nothing of it changes while it is read."""

    @property
    def run(self) -> RecordedRun:
        """What it is a recording of."""
        ...

    async def groups(self) -> Sequence[GroupRow]:
        """Every group, in the order in which they opened."""
        ...

    async def batches(self) -> Sequence[BatchRow]:
        """Every batch, those that were revoked too, in the order of their numbers."""
        ...

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[StoredSample]]:
        """By group, every sample that names it, late and surplus ones too, in the order in which they came.

        Raises ``RecordingDamaged`` for a group that a file has without its samples; the others can be asked for.
        """
        ...

    def has_body(self, sample: StoredSample) -> bool:
        """Whether its body is still there; retention removes those of a journal."""
        ...

    async def bodies(self, samples: Sequence[StoredSample]) -> Sequence[bytes]:
        """Their bodies as they were stored, in that order.

        Raises ``StorageFailed`` (``BodyUnreadable``, ``RecordingDamaged``) for one that is gone or damaged.
        """
        ...

    async def recorded(self, samples: Sequence[StoredSample]) -> list[Recorded]:
        """The samples with their bodies. Raises as ``bodies``, and ``BodyUnreadable`` where retention has taken one."""
        if not all(map(self.has_body, samples)):
            raise BodyUnreadable("retention has removed it")
        return [(sample.row, body) for sample, body in zip(samples, await self.bodies(samples), strict=True)]

    def left_out(self) -> Mapping[str, str]:
        """By id, the groups of a file whose samples could not be read when it was exported, and why."""
        return {}
