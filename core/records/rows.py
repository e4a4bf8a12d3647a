"""What is stored. Each row is the whole new value of one thing, so that applying it twice changes nothing."""

from typing import Any, Literal

import msgspec

from forebay.core.group import BatchState, GroupState
from forebay.core.ids import InstanceId
from forebay.core.reward_place import Span

Outcome = Literal["member", "late", "surplus"]
"""What became of a sample: in a group; after its group had closed; beyond what its group can hold."""


REMOVED = "removed"
"""The state of a run in place of which nothing is known. This row stays: records from before may stay, too."""


class RunRow(msgspec.Struct, tag="run", kw_only=True):
    """A run as it is now. ``document`` holds what only the buffer and the server interpret."""

    run_id: str
    name: str
    task_type: str
    state: str
    created_at_s: float
    """Wall-clock seconds since the Unix epoch."""
    active_s: float
    """How long the run's deadlines have been counting."""
    document: dict[str, Any]


class StartRow(msgspec.Struct, tag="start", kw_only=True):
    """What a run was last started with, with its lists of ids: written with each start, not with each report."""

    run_id: str
    document: dict[str, Any]


class TickRow(msgspec.Struct, tag="tick", kw_only=True):
    """The run's deadlines have counted to here."""

    run_id: str
    active_s: float


class GroupRow(msgspec.Struct, tag="group", kw_only=True):
    """A group as it is now. Times are in the run's active seconds. An open group's counts come from its samples."""

    run_id: str
    group_id: str
    instance_id: InstanceId
    epoch: int
    state: GroupState
    opened_s: float
    number: int = 0
    """Place in the order in which the run's groups opened, from 1."""
    order: int = 0
    """Place in the order of delivery; 0 until the group is ready."""
    reason: str = ""
    detail: str = ""
    """A traceback or another long explanation."""
    lowest_reward: float | None = None
    """Of a group that was filtered because of the run's ``reward_range``; else None."""
    highest_reward: float | None = None
    is_salvaged: bool = False
    last_sample_s: float | None = None
    idle_since_s: float | None = None
    """Since when its run process says that none of its rollouts is in flight; None while one is, or nobody says."""
    idle_s: float = 0.0
    """For how long that was so before."""
    timeout_from_s: float = 0.0
    """From when on the time since its last sample counted when that ended last; a later sample overrides it."""
    closed_s: float | None = None
    closed_seq: int = 0
    """Place in the run's sequence of closed groups; 0 while open."""
    num_samples: int = 0
    """Slots that have their sample. Forks are not counted, neither here nor in ``num_failed``."""
    num_failed: int = 0
    num_forks: int = 0
    num_deliveries: int = 0
    surplus_due: int = 0
    """How many samples of this instance a restarted run will produce a second time."""
    num_stragglers: int = 0
    """Late samples of a writer that sends no epoch; no more than slots were empty when the group was closed."""
    is_reported: bool = False
    """Whether a successful reply has listed this group as finished."""
    may_be_known: bool = False
    """Whether it was once listed in a reply that was taken back, but that the trainer may have got."""
    batch_id: str = ""


class BatchRow(msgspec.Struct, tag="batch", kw_only=True):
    """A batch as it is now."""

    run_id: str
    batch_id: str
    number: int
    """Place in the run's sequence of batches, from 1."""
    state: BatchState
    group_ids: list[str]
    """Its groups in the order in which they went out."""
    reported_ids: list[str] = []
    """Groups that had ended undelivered, and that its ``finished_groups`` listed."""
    stale_ids: list[str] = []
    """Those of its groups that went out marked as stale."""
    num_rows: int = 0
    request_id: str = ""
    """The reader's name for its request; "" if it gave none."""
    step: int | None = None
    """What the trainer said that it will use the batch for."""
    checkpoint_step: int | None = None
    """The checkpoint that holds it."""
    lease_s: float = 0.0
    leased_at_s: float = 0.0
    """Wall-clock seconds at which the lease began, or was last renewed."""
    is_self_acking: bool = False
    """Whether it is acknowledged by its last byte, as slime's reads are."""
    reason: str = ""
    """Why it was revoked."""
    meta_info: dict[str, Any] = {}
    """What its reply said; empty for a self-acking batch, which is never sent a second time."""


class CheckpointRow(msgspec.Struct, tag="checkpoint", kw_only=True):
    """A checkpoint of the trainer's. The batches that it holds name it."""

    run_id: str
    step: int
    at_s: float
    """Wall-clock seconds at which it was first reported."""
    is_forgotten: bool = False
    """Whether a rewind went behind it."""
    weight_version: int | None = None
    """What the trainer had announced by then; None if nothing."""


class _SampleFields(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """What is stored of a sample beside its group and its body."""

    uid: str
    slot: int
    """-1 when neither sent nor assigned."""
    outcome: Outcome
    reward: float | None
    """None means that the sample failed; then ``error`` says why."""
    at_s: float
    """Active seconds of the run at arrival."""
    received_at_s: float
    """Wall-clock seconds at arrival."""
    error: str = ""
    reward_start: int = 0
    """Where the reward's number begins in the body, and where it ends; both 0 if the text leaves it in doubt."""
    reward_end: int = 0
    rollout_id: str = ""
    """Samples of a group that share it are forks of one rollout; "" means that it was not sent."""
    oldest_version: int | None = None
    """The oldest weight version among those that the sample names; None when it names none."""
    group_number: int = 0
    """The number of the group that it opens if it is the first."""
    fork: int = 0
    """Which fork of the rollout in its slot it is, from 1; 0 for the main sample, which alone fills the slot."""
    rollout_outcome: str = ""
    """How its rollout ended (``core.outcome``)."""
    is_foreign: bool = False
    """Whether the names of ours that its body may have mean something else there (``core.sample.WRITER_HEADER``)."""


class SampleRow(_SampleFields, tag="sample", kw_only=True, frozen=True, gc=False):
    """The index columns of a sample; its body is stored beside it as it arrived. It never changes."""

    run_id: str
    instance_id: InstanceId
    group_id: str
    """The group that it belongs to, or, late or surplus, the one that it came too late for."""
    epoch: int

    @property
    def reward_span(self) -> Span | None:
        """Where the reward's number stands in the body; None if the text leaves it in doubt."""
        return (self.reward_start, self.reward_end) if self.reward_end else None


class SampleColumns(_SampleFields, array_like=True, kw_only=True, frozen=True, gc=False):
    """What a ``ColumnsRow`` has of one sample: where its body lies in the segment, too."""

    offset: int
    length: int


class ColumnsRow(msgspec.Struct, tag="columns", kw_only=True, frozen=True):
    """Every sample that names one group and has its body in one segment, without the bodies.

    Written before the segment is removed, so that all but the bodies stays known.
    """

    run_id: str
    group_id: str
    instance_id: InstanceId
    epoch: int
    segment: int
    samples: list[SampleColumns]


Row = RunRow | StartRow | TickRow | GroupRow | SampleRow | ColumnsRow | BatchRow | CheckpointRow


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a body lies: segment number, offset in bytes of its first byte, length in bytes."""

    segment: int
    offset: int
    length: int


class StoredSample(msgspec.Struct):
    """A sample's columns and where its body lies."""

    row: SampleRow
    location: Location


class FoundGroup(msgspec.Struct, frozen=True):
    """What is stored of one group."""

    group_id: str
    row: GroupRow | None
    """None if samples name the group, or somebody asked for it, but it never was."""
    uids: list[str]
    """Those of all samples that name it; empty if they were not asked for."""


def to_columns(sample: StoredSample) -> SampleColumns:
    """What a ``ColumnsRow`` has of ``sample``."""
    return SampleColumns(**_fields(sample.row), offset=sample.location.offset, length=sample.location.length)


def from_columns(columns: ColumnsRow) -> list[StoredSample]:
    """The samples that the row has, and where their bodies lie, or lay."""
    group = {name: getattr(columns, name) for name in ("run_id", "group_id", "instance_id", "epoch")}
    return [
        StoredSample(SampleRow(**group, **_fields(each)), Location(columns.segment, each.offset, each.length))
        for each in columns.samples
    ]


def _fields(sample: _SampleFields) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in _SampleFields.__struct_fields__}
