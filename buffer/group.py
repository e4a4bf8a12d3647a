"""A group with its samples, as they are in memory."""

import msgspec

from forebay.buffer.store.rows import GroupRow, Location, Outcome
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.core.sample import Span


class Sample(msgspec.Struct, gc=False):
    """A sample in memory: its index columns, and its body until the disk has it."""

    uid: str
    slot: int
    reward: float | None
    num_bytes: int
    reward_span: Span | None = None
    location: Location | None = None
    body: bytes | None = None
    rollout_id: str = ""
    oldest_version: int | None = None
    is_binary: bool | None = None
    """Whether the body is a binary sample; None when that is not known yet."""


class Group:
    """A group and, while it lives, its samples."""

    __slots__ = ("repeats", "row", "samples", "slots", "staged")

    def __init__(self, row: GroupRow) -> None:
        self.row = row
        self.samples: list[Sample] = []
        self.slots: set[int] = set()
        self.staged: object | None = None
        """What the last hooks made of it, kept until it is delivered or changes."""
        self.repeats: set[str] = set()
        """Uids that were there when the run process was restarted, and that it has not sent again."""

    @property
    def group_id(self) -> str:
        return self.row.group_id

    @property
    def instance_id(self) -> InstanceId:
        return self.row.instance_id

    @property
    def state(self) -> GroupState:
        return self.row.state

    @property
    def completed(self) -> list[Sample]:
        """The samples that did not fail, in the order in which they came."""
        return [sample for sample in self.samples if sample.reward is not None]

    @property
    def num_bytes(self) -> int:
        return sum(sample.num_bytes for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the samples that did not fail; None if none of them tells."""
        versions = (sample.oldest_version for sample in self.samples if sample.reward is not None)
        return min((version for version in versions if version is not None), default=None)

    def free_slot(self) -> int:
        """The lowest slot without a sample."""
        slot = len(self.slots)
        if slot not in self.slots:
            return slot
        return next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots)


class Placement(msgspec.Struct, frozen=True):
    """Where a sample belongs."""

    group: Group
    slot: int
    outcome: Outcome
    is_group_changed: bool = False
    """Whether the group's row changed and must be stored with the sample."""
