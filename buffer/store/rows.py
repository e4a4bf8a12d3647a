"""What is stored. Each row is the whole new value of one thing, so that applying it twice changes nothing."""

from typing import Any, Literal

import msgspec

from forebay.core.group import GroupState
from forebay.core.ids import InstanceId

Outcome = Literal["member", "late", "surplus"]
"""What became of a sample: in a group; after its group had closed; beyond what its group can hold."""


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
    order: int = 0
    """Place in the order of delivery; 0 until the group is ready."""
    reason: str = ""
    detail: str = ""
    """A traceback or another long explanation."""
    is_salvaged: bool = False
    is_announced: bool = False
    last_sample_s: float | None = None
    closed_s: float | None = None
    closed_seq: int = 0
    """Place in the run's sequence of closed groups; 0 while open."""
    num_samples: int = 0
    num_failed: int = 0
    num_deliveries: int = 0
    surplus_due: int = 0
    """How many samples of this instance a restarted run will produce a second time."""
    is_reported: bool = False
    """Whether a successful reply has listed this group as finished."""
    batch_id: str = ""


class SampleRow(msgspec.Struct, tag="sample", kw_only=True):
    """The index columns of a sample; its body is stored beside it as it arrived."""

    run_id: str
    uid: str
    instance_id: InstanceId
    group_id: str
    """The group that it belongs to, or, late or surplus, the one that it came too late for."""
    epoch: int
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


Row = RunRow | TickRow | GroupRow | SampleRow


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where a body lies: segment number, offset in bytes of its first byte, length in bytes."""

    segment: int
    offset: int
    length: int


class StoredSample(msgspec.Struct):
    """A sample's columns and where its body lies."""

    row: SampleRow
    location: Location
