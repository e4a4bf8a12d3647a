"""What goes into the hooks and what comes out: the words that the buffer and the hook host share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from forebay.core.ids import InstanceId

Item = dict[str, Any]
"""A sample as a hook sees it: the JSON object that was written."""

Group = tuple[InstanceId, list[Item]]
"""An instance and its samples, failed ones excepted, in the order in which they arrived."""

Contract = Literal["A", "B"]
"""Which of slime's two sets of functions a generator file follows."""

Stage = Literal["judge", "process", "meta_info"]
"""The three moments of a read at which hooks are asked."""

Event = Literal["run_started", "run_ended", "group_closed", "batch_delivered"]
"""What plugins are notified of."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The counts that hooks compare a group with, all in samples."""

    group_size: int
    min_valid_group_size: int
    min_valid_item_size: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``is_valid_group`` decided. A valid group is finished; a finished one that is not valid is discarded."""

    is_valid: bool
    is_finished: bool


@dataclass(slots=True)
class HookInput:
    """One group: its samples' index columns, and a way to get their bodies when a hook needs to see them.

    ``bodies`` yields one JSON object per reward, as stored, in the same order. Samples that share a rollout id other
    than "" are forks of one rollout; an empty list means that none has one. ``forks`` are 0 for a slot's main sample
    and the number of the fork for others; an empty list means that there are none.
    """

    instance_id: InstanceId
    rewards: list[float]
    bodies: Callable[[], Awaitable[list[bytes]]]
    rollout_ids: list[str] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)


class Row(msgspec.Struct, gc=False):
    """One row of a batch.

    Without ``body`` it is the stored body of sample number ``source`` with ``reward`` set in, and ``raw_reward`` unless
    that is None. With ``body`` it is that JSON object, as a user's hook left it; ``source`` is then the sample that has
    its uid, if any, and the rewards are those in it, None where they are no numbers.
    """

    source: int | None
    reward: float | None
    raw_reward: float | None
    body: bytes | None


@dataclass(slots=True)
class Processed:
    """What the hooks made of a group: its rows, in order."""

    rows: list[Row]
    num_kept: int
    """Samples left after ``filter_item`` (contract A), forks not counted; rows after ``transform_group`` (B)."""
    is_filtered: bool
    """Fewer samples than ``min_valid_item_size`` were left after the filter; ``rows`` is empty."""
    is_out_of_range: bool = False
    """Enough would have been left but for rewards outside the run's ``reward_range``, and no filter of the file's."""
