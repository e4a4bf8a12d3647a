"""The recorded samples of one group, as sent to a run process: their columns, then their bodies."""

from collections.abc import Sequence

import msgspec

from forebay.core.binary_sample import join_samples, split_samples
from forebay.core.records.rows import SampleRow


class GroupHead(msgspec.Struct, kw_only=True, frozen=True):
    """A group of a recorded run, with the columns of its samples in the order of their bodies."""

    run_id: str
    group_id: str
    epoch: int
    """Differs from the requested epoch if that is missing and another replaces it."""
    samples: list[SampleRow]


class RecordedBodies(msgspec.Struct, kw_only=True, frozen=True):
    """A group with the bodies of its samples. The body of an unreadable sample is empty."""

    head: GroupHead
    bodies: Sequence[bytes]

    def by_slot(self) -> dict[int, list[tuple[SampleRow, bytes]]]:
        """The samples of each slot, ordered by slot: first the forks, then the rollout's own sample."""
        samples = self.head.samples
        found: dict[int, list[tuple[SampleRow, bytes]]] = {record.slot: [] for record in samples if not record.fork}
        for record, body in zip(samples, self.bodies, strict=True):
            found.setdefault(record.slot, []).append((record, body))
        return {slot: sorted(samples, key=lambda each: not each[0].fork) for slot, samples in found.items()}


def first_frame(head: GroupHead) -> bytes:
    """The first part of the reply: the head."""
    return join_samples([msgspec.json.encode(head)])


def read_frames(body: bytes) -> RecordedBodies:
    """Decode the whole reply. Raises ``InvalidInput``, ``msgspec.DecodeError``."""
    head, *bodies = split_samples(body) or [b""]
    return RecordedBodies(head=msgspec.json.decode(head, type=GroupHead), bodies=bodies)
