"""The recorded samples of one group on their way to a run process: what is known of each, then their bodies."""

from collections.abc import Sequence

import msgspec

from forebay.core.binary_sample import join_samples, split_samples
from forebay.core.records.rows import SampleRow


class GroupHead(msgspec.Struct, kw_only=True, frozen=True):
    """Which group of which run this is, and what is known of its samples, in the order of their bodies."""

    run_id: str
    group_id: str
    epoch: int
    """Another one than was asked for, where that is missing, and another takes its place."""
    samples: list[SampleRow]


class RecordedBodies(msgspec.Struct, kw_only=True, frozen=True):
    """A group with the bodies of its samples; one that cannot be read is empty."""

    head: GroupHead
    bodies: Sequence[bytes]

    def by_slot(self) -> dict[int, list[tuple[SampleRow, bytes]]]:
        """The samples of each slot, forks first, then that of the rollout itself, by which slots are ordered."""
        samples = self.head.samples
        found: dict[int, list[tuple[SampleRow, bytes]]] = {record.slot: [] for record in samples if not record.fork}
        for record, body in zip(samples, self.bodies, strict=True):
            found.setdefault(record.slot, []).append((record, body))
        return {slot: sorted(samples, key=lambda each: not each[0].fork) for slot, samples in found.items()}


def first_frame(head: GroupHead) -> bytes:
    """What comes first."""
    return join_samples([msgspec.json.encode(head)])


def read_frames(body: bytes) -> RecordedBodies:
    """All of it. Raises ``InvalidInput``, ``msgspec.DecodeError``."""
    head, *bodies = split_samples(body) or [b""]
    return RecordedBodies(head=msgspec.json.decode(head, type=GroupHead), bodies=bodies)
