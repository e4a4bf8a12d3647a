"""Stored rows. Each row is the complete new value of one object, so applying it twice changes nothing."""

from typing import Any, Literal

import msgspec

from forebay.core.group import BatchState, GroupState
from forebay.core.ids import InstanceId
from forebay.core.records.reward_place import Span

Outcome = Literal["member", "late", "surplus", "part", "note"]
"""Outcome of a sample: in a group; after its group had closed; beyond its group's size. Two more mark rows that are no
samples, in the group of their samples: ``part``, whose uid is a NUL and its digest, and ``note`` (``notes.py``)."""

PART_PREFIX = "\0"
"""Begins the uid of a part or a note; samples may not have it."""
NOTE_PREFIX = f"{PART_PREFIX}note/"
"""Begins the uid of a note."""

REMOVED = "removed"
"""State of a removed run. The row stays, because older records of the run may still be in the log."""


class RunRow(msgspec.Struct, tag="run", kw_only=True):
    """A run's current state. ``document`` is interpreted only by the buffer and the server."""

    run_id: str
    name: str
    task_type: str
    state: str
    created_at_s: float
    """Wall-clock seconds since the Unix epoch."""
    active_s: float
    """Seconds counted by the run's deadlines."""
    document: dict[str, Any]


class StartRow(msgspec.Struct, tag="start", kw_only=True):
    """Parameters of a run's last start, with its lists of ids: written at each start, not at each report."""

    run_id: str
    document: dict[str, Any]


class TickRow(msgspec.Struct, tag="tick", kw_only=True):
    """Active seconds that the run's deadlines have counted."""

    run_id: str
    active_s: float


class GroupRow(msgspec.Struct, tag="group", kw_only=True):
    """A group's current state. Times are active seconds of the run. An open group's counts come from its samples."""

    run_id: str
    group_id: str
    instance_id: InstanceId
    epoch: int
    state: GroupState
    opened_s: float
    number: int = 0
    """Position in the order in which the run's groups opened, from 1."""
    order: int = 0
    """Position in the order of delivery; 0 until the group is ready."""
    reason: str = ""
    detail: str = ""
    """A traceback or another long explanation."""
    lowest_reward: float | None = None
    """Lowest reward of a group that was filtered by the run's ``reward_range``; otherwise None."""
    highest_reward: float | None = None
    is_salvaged: bool = False
    last_sample_s: float | None = None
    idle_since_s: float | None = None
    """Since when its process reports none of its rollouts in flight; None while one is, or without reports."""
    idle_s: float = 0.0
    """Total seconds of earlier periods without a rollout in flight."""
    timeout_from_s: float = 0.0
    """Start of its time-out, as of the end of the last such period; a later sample overrides it."""
    closed_s: float | None = None
    closed_seq: int = 0
    """Position in the run's sequence of closed groups; 0 while open."""
    num_samples: int = 0
    """Number of slots with a sample. Forks are not counted, nor in ``num_failed``."""
    num_failed: int = 0
    num_forks: int = 0
    num_deliveries: int = 0
    surplus_due: int = 0
    """Number of this instance's samples that a restarted run will produce again."""
    num_stragglers: int = 0
    """Late samples from a writer without epochs; at most the number of slots empty at closing."""
    is_reported: bool = False
    """Whether a successful reply has listed this group as finished."""
    may_be_known: bool = False
    """Whether a revoked reply listed it that the trainer may still have received."""
    batch_id: str = ""
    weight_version: int | None = None
    """Version announced by the trainer when the group was last leased, or discarded; None if none."""


class BatchRow(msgspec.Struct, tag="batch", kw_only=True):
    """A batch's current state."""

    run_id: str
    batch_id: str
    number: int
    """Position in the run's sequence of batches, from 1."""
    state: BatchState
    group_ids: list[str]
    """Its groups, in order of delivery."""
    reported_ids: list[str] = []
    """Undelivered groups that its ``finished_groups`` listed."""
    stale_ids: list[str] = []
    """Its groups that were delivered marked as stale."""
    num_rows: int = 0
    request_id: str = ""
    """The reader's id for its request; "" if none was given."""
    step: int | None = None
    """The training step for which the trainer requested the batch."""
    checkpoint_step: int | None = None
    """The checkpoint that holds it."""
    lease_s: float = 0.0
    leased_at_s: float = 0.0
    """Wall-clock seconds at which the lease began, or was last renewed."""
    is_self_acking: bool = False
    """Whether sending the last byte acknowledges it, as in slime's reads."""
    reason: str = ""
    """Why it was revoked."""
    meta_info: dict[str, Any] = {}
    """Meta info of its reply; empty for a self-acking batch, which is never resent."""


class CheckpointRow(msgspec.Struct, tag="checkpoint", kw_only=True):
    """A checkpoint of the trainer. Its batches name it in ``checkpoint_step``."""

    run_id: str
    step: int
    at_s: float
    """Wall-clock seconds at which it was first reported."""
    is_forgotten: bool = False
    """Whether a rewind has undone it."""
    weight_version: int | None = None
    """Version announced by the trainer at that time; None if none."""


class _SampleFields(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The stored fields of a sample, except its group and its body."""

    uid: str
    slot: int
    """-1 if neither sent nor assigned."""
    outcome: Outcome
    reward: float | None
    """None if the sample failed; then ``error`` says why."""
    at_s: float
    """Active seconds of the run at arrival."""
    received_at_s: float
    """Wall-clock seconds at arrival."""
    error: str = ""
    reward_start: int = 0
    """Start and end offset of the reward's number in the body; both 0 if ambiguous."""
    reward_end: int = 0
    rollout_id: str = ""
    """Samples of a group that share it are forks of one rollout; "" if it was not sent."""
    oldest_version: int | None = None
    """The oldest weight version that the sample names; None if it names none."""
    group_number: int = 0
    """The number of the group, if this sample is the first to open it."""
    fork: int = 0
    """Number of the fork within its slot's rollout, from 1; 0 for the main sample, which alone fills the slot."""
    rollout_outcome: str = ""
    """How its rollout ended (``core.outcome``)."""
    is_foreign: bool = False
    """Whether Forebay's field names in its body may mean something else there (``core.sample.WRITER_HEADER``)."""


class SampleRow(_SampleFields, tag="sample", kw_only=True, frozen=True, gc=False):
    """The indexed columns of a sample; its body is stored next to them, unchanged. Immutable."""

    run_id: str
    instance_id: InstanceId
    group_id: str
    """The group it belongs to; for a late or surplus sample, the group that it missed."""
    epoch: int
    num_tokens: int = 0
    """Number of tokens of a binary sample; 0 for JSON."""
    reward_parts: dict[str, float] | None = None
    """Named parts of the reward; None without any."""

    @property
    def reward_span(self) -> Span | None:
        """Where the reward's number is in the body; None if ambiguous."""
        return (self.reward_start, self.reward_end) if self.reward_end else None

    @property
    def is_sample(self) -> bool:
        """Whether it is a sample, and neither a part nor a note."""
        return not self.uid.startswith(PART_PREFIX)

    @property
    def is_rewarded(self) -> bool:
        """Whether it is the main sample of a slot of its group, and has a reward."""
        return self.outcome == "member" and not self.fork and self.reward is not None

    @property
    def digest(self) -> str:
        """The digest of a part; "" for a sample."""
        return self.uid[len(PART_PREFIX) :] if self.outcome == "part" else ""


def part_row(sample: SampleRow, digest: str) -> SampleRow:
    """The row of a part that a sample or a note names."""
    return beside(sample, PART_PREFIX + digest, "part", sample.at_s, sample.received_at_s)


def beside(sample: SampleRow, uid: str, outcome: Outcome, at_s: float, received_at_s: float) -> SampleRow:
    """A row in the group of ``sample`` that is no sample itself."""
    own = {"uid": uid, "slot": -1, "outcome": outcome, "reward": None, "at_s": at_s, "received_at_s": received_at_s}
    return SampleRow(**(_group_of(sample) | own))


class SampleColumns(_SampleFields, array_like=True, kw_only=True, frozen=True, gc=False):
    """One sample's columns in a ``ColumnsRow``, with the offset and length of its body in the segment."""

    offset: int
    length: int
    # Last, because older journals lack them.
    num_tokens: int = 0
    reward_parts: dict[str, float] | None = None


class ColumnsRow(msgspec.Struct, tag="columns", kw_only=True, frozen=True):
    """All samples that name one group and have their bodies in one segment, without the bodies.

    Written before the segment is removed, so that everything except the bodies stays known.
    """

    run_id: str
    group_id: str
    instance_id: InstanceId
    epoch: int
    segment: int
    samples: list[SampleColumns]


Row = RunRow | StartRow | TickRow | GroupRow | SampleRow | ColumnsRow | BatchRow | CheckpointRow


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a body is stored: segment number, offset of its first byte, length in bytes."""

    segment: int
    offset: int
    length: int


class StoredSample(msgspec.Struct):
    """A sample's columns and the location of its body."""

    row: SampleRow
    location: Location


class FoundGroup(msgspec.Struct, frozen=True):
    """What the store has about one group."""

    group_id: str
    row: GroupRow | None
    """None if the group never existed, although samples or a caller name it."""
    uids: list[str]
    """Uids of all samples that name it; empty if not requested."""


def to_columns(sample: StoredSample) -> SampleColumns:
    """Make the entry for ``sample`` in a ``ColumnsRow``."""
    at, row = sample.location, sample.row
    own: dict[str, Any] = {"num_tokens": row.num_tokens, "reward_parts": row.reward_parts}
    return SampleColumns(**_fields(row), offset=at.offset, length=at.length, **own)


def from_columns(columns: ColumnsRow) -> list[StoredSample]:
    """Restore the row's samples with the locations, current or former, of their bodies."""
    group = _group_of(columns)
    return [
        StoredSample(
            SampleRow(**group, **_fields(each), num_tokens=each.num_tokens, reward_parts=each.reward_parts),
            Location(columns.segment, each.offset, each.length),
        )
        for each in columns.samples
    ]


def _group_of(row: SampleRow | ColumnsRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("run_id", "group_id", "instance_id", "epoch")}


def _fields(sample: _SampleFields) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in _SampleFields.__struct_fields__}
