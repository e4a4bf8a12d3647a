"""What a recording says of a run, its groups, samples and batches, wherever it lies: in a journal, or in a file."""

from typing import Annotated, Any, Literal

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.sample import MAX_SLOT, Epoch

Short = Annotated[str, msgspec.Meta(max_length=64)]
"""What is noted in a run, or in each of its samples: no longer than Forebay makes it."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOT + 1)]


class RunRecord(msgspec.Struct, kw_only=True, frozen=True):
    """What a run was started with, and how it stood when it was recorded. Without keys and credentials."""

    run_id: Short
    name: Short
    task_type: str
    origin: str
    """``slime`` or ``native``: what its ``payload`` leaves out has other defaults."""
    state: str
    reason: str
    created_at_s: float
    """Wall-clock seconds since the Unix epoch."""
    payload: dict[str, Any]
    """What it was started with, but for ``skip_instance_ids`` and what is secret."""
    generator_sha256: Short
    generator_hooks: list[str]
    """The hooks that its generator file implements."""
    generator_contract: str | None
    """Which of slime's contracts the file declares."""
    input_sha256: Short
    """Of its input file's bytes, in hex; "" where that is not known."""
    weight_version: int | None
    """What its trainer last announced."""
    generator_files: dict[Annotated[str, msgspec.Meta(max_length=255)], Short] = {}
    """SHA-256 by name of the files that ``generator_sha256`` covers; none where it is not known."""
    num_groups_total: int | None = None
    """How many groups the run planned; None when unknown."""


class GroupRecord(msgspec.Struct, kw_only=True, frozen=True):
    """How a group ended, or stood. Times are in the run's active seconds."""

    group_id: str
    instance_id: InstanceId
    epoch: Epoch
    number: int
    """Place in the order in which the run's groups opened, from 1."""
    order: int
    """Place in the order of delivery; 0 where it never was ready."""
    closed_seq: int
    """Place in the order in which groups closed; 0 while open."""
    state: str
    reason: str
    """Why it was discarded."""
    is_salvaged: bool
    opened_s: float
    closed_s: float | None
    num_samples: Count
    """Slots that had their sample."""
    num_failed: Count


class SampleRecord(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The columns of a sample: all that a buffer must know of it besides the bytes of its body."""

    uid: str
    instance_id: InstanceId
    group_id: str
    epoch: Epoch
    slot: Annotated[int, msgspec.Meta(ge=-1, le=MAX_SLOT)]
    """-1 when neither sent nor assigned."""
    became: Literal["member", "late", "surplus"]
    """``member`` of its group, ``late`` or ``surplus``."""
    reward: float | None
    """None means that it failed; then ``error`` says why."""
    at_s: float
    """Active seconds of its run at arrival."""
    error: str
    reward_start: int
    """Where the reward's number begins in the body, and where it ends; both 0 if the text leaves it in doubt."""
    reward_end: int
    rollout_id: str
    oldest_version: int | None
    """The oldest weight version among those that it names."""
    fork: int
    rollout_outcome: str
    """How its rollout ended (``core.outcome``); "" where that was not stored."""
    is_foreign: bool
    """Whether the names of ours that its body may have mean something else there."""
    place: tuple[int, int, int] = (0, 0, 0)
    """Where its source finds the body, and of how many bytes (the last of them); of no meaning elsewhere."""


class BatchRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A batch that a trainer got, with its groups in the order in which they went out."""

    batch_id: str
    number: int
    """Place in the run's sequence of batches, from 1."""
    state: str
    group_ids: list[str]
    step: int | None
    """What the trainer said that it would use the batch for."""
    checkpoint_step: int | None
    """The checkpoint that holds it."""
    is_self_acking: bool = False
    """Whether it went out over slime's routes, where each group has exactly ``group_size`` rows."""
