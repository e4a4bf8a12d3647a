"""The interface of what is replayed: a run in this server's journal, or an exported file."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.core.errors import BodyUnreadable
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import BatchRow, GroupRow, SampleRow, StoredSample

Recorded = tuple[SampleRow, bytes]
"""A sample's columns and its body."""


class Source(Protocol):
    """A recording, read group by group. It must not change while it is read."""

    @property
    def run(self) -> RecordedRun:
        """The recorded run."""
        ...

    async def groups(self) -> Sequence[GroupRow]:
        """Every group, in the order in which they opened."""
        ...

    async def batches(self) -> Sequence[BatchRow]:
        """Every batch, including revoked ones, by number."""
        ...

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[StoredSample]]:
        """By group, every sample that names it, including late and surplus ones, in order of arrival.

        Raises ``RecordingDamaged`` if a group was exported without its samples; the other groups can still be read.
        """
        ...

    def has_body(self, sample: StoredSample) -> bool:
        """Whether its body still exists; retention removes bodies from a journal."""
        ...

    async def bodies(self, samples: Sequence[StoredSample]) -> Sequence[bytes]:
        """The bodies of samples, unchanged, in this order.

        Raises ``StorageFailed`` (``BodyUnreadable``, ``RecordingDamaged``) if one is missing or damaged.
        """
        ...

    async def recorded(self, samples: Sequence[StoredSample]) -> list[Recorded]:
        """The samples with their bodies. Raises as ``bodies``, and ``BodyUnreadable`` if retention has removed one."""
        if not all(map(self.has_body, samples)):
            raise BodyUnreadable("retention has removed it")
        return [(sample.row, body) for sample, body in zip(samples, await self.bodies(samples), strict=True)]

    def left_out(self) -> Mapping[str, str]:
        """By id, the groups that were exported without their samples, and why."""
        return {}
