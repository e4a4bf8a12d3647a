"""Arguments and results of hooks, shared by the buffer and the hook host."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from forebay.core.ids import InstanceId

Item = dict[str, Any]
"""A sample as seen by hooks: the JSON object that was written."""

Group = tuple[InstanceId, list[Item]]
"""An instance and its samples in order of arrival, without failed ones."""

Contract = Literal["A", "B"]
"""Which of slime's two sets of functions a generator file follows."""

Stage = Literal["judge", "process", "meta_info"]
"""The three stages of a read that call hooks."""

Event = Literal["run_started", "run_ended", "group_closed", "batch_delivered"]
"""Events of which plugins are notified."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts that hooks compare a group with, all in samples."""

    group_size: int
    min_valid_group_size: int
    min_valid_item_size: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision of ``is_valid_group``. A valid group is finished; a finished group that is not valid is discarded."""

    is_valid: bool
    is_finished: bool


@dataclass(slots=True)
class HookInput:
    """One group: the index columns of its samples, and a function that loads their bodies when a hook needs them.

    ``bodies`` returns one stored JSON object per reward, in the same order. Samples that share a rollout id other than
    "" are forks of one rollout; an empty list means no ids. ``forks`` contains 0 for a slot's main sample and the
    fork's number for others; an empty list means no forks.
    """

    instance_id: InstanceId
    rewards: list[float]
    bodies: Callable[[], Awaitable[list[bytes]]]
    rollout_ids: list[str] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)


class Row(msgspec.Struct, gc=False):
    """One row of a batch.

    Without ``body``, the row is the stored body of sample number ``source`` with ``reward`` inserted, and
    ``raw_reward`` unless that is None. With ``body``, the row is that JSON object, as returned by a user's hook.
    ``source`` is then the sample with the same uid, if any, and the rewards are those in the body, or None if they are
    not numbers.
    """

    source: int | None
    reward: float | None
    raw_reward: float | None
    body: bytes | None


@dataclass(slots=True)
class Processed:
    """Result of the hooks for a group: its rows, in order."""

    rows: list[Row]
    num_kept: int
    """Samples left after ``filter_item`` without forks (contract A), or rows after ``transform_group`` (B)."""
    is_filtered: bool
    """Whether the filter left fewer samples than ``min_valid_item_size``; ``rows`` is then empty."""
    is_out_of_range: bool = False
    """Whether only the run's ``reward_range``, and no filter of the file, left too few samples."""
    has_dropped_arrays: bool = False
    """Whether a hook changed the number of tokens of a row, which lost its side arrays."""
