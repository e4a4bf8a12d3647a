"""What a trainer gets: batches, groups, and what the server tells about runs and checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from forebay.core.ids import InstanceId

Row: TypeAlias = dict[str, Any]
"""A sample as the reader gets it: what was written, with ``reward`` normalised and ``raw_reward`` as it was."""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one instance in one epoch."""

    instance_id: InstanceId
    samples: Sequence[Row]


@dataclass(frozen=True)
class Batch:
    """Whole groups that are this reader's until it checkpoints, acks or releases them, or its lease runs out."""

    batch_id: str
    rows: Sequence[Row]
    """The samples of all groups; those of a group are adjacent."""
    meta_info: dict[str, Any]
    """What the run's hook tells of all that arrived since the last batch."""
    lease_s: float
    num_groups: int
    step: int | None = None
    """The step that the batch was asked for."""
    content: bytes = field(default=b"", repr=False)
    """The tensors of a batch that came as such: its rows are without ``tokens``, ``logprobs`` and ``loss_mask``."""

    @cached_property
    def groups(self) -> list[Group]:
        """The rows by group, oldest ready group first."""
        return [Group(rows[0]["instance_id"], rows) for rows in _by_group(self.rows, self.num_groups)]


def _by_group(rows: Sequence[Row], num_groups: int) -> list[Sequence[Row]]:
    """Cut where instance or epoch change; two epochs of an instance, side by side and untold, are cut by size."""
    stretches = [list(stretch) for _, stretch in groupby(rows, _key)]
    if len(stretches) == num_groups or not num_groups or len(rows) % num_groups:
        return list(stretches)
    size = len(rows) // num_groups
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    is_whole = all(_key(chunk[0]) == _key(row) for chunk in chunks for row in chunk)
    return list(chunks) if is_whole else list(stretches)


def _key(row: Row) -> tuple[str, object, object]:
    instance_id = row["instance_id"]
    return type(instance_id).__name__, instance_id, row.get("epoch")


BatchLike: TypeAlias = Batch | str
"""A batch or its id."""


def batch_ids(batches: BatchLike | Iterable[BatchLike]) -> list[str]:
    """The ids of one batch or of several."""
    given = [batches] if isinstance(batches, Batch | str) else batches
    return [batch.batch_id if isinstance(batch, Batch) else batch for batch in given]


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers, as ``GET /v1/runs/{run_id}`` shows it."""

    run_id: str
    task_type: str
    state: str
    """``validating``, ``running``, ``finished``, ``stopped`` or ``failed``."""
    has_ended: bool
    """Nothing will come from it any more; what is ready can still be read."""
    name: str = ""
    reason: str = ""
    """Why it stopped or failed."""
    is_waiting_for_engine: bool = False
    is_held: bool = False
    """It waits for the trainer's next weight version: its step has all the groups that it needs."""
    is_paused: bool = False
    """Its engines stand still, until its trainer or the server lets them go on."""
    is_stalled: bool = False
    weight_version: int | None = None
    created_at_s: float = 0.0
    """Seconds since the Unix epoch."""
    num_groups_total: int | None = None
    """Groups that it will have in all, where its generator knows."""
    groups: dict[str, int] = {}
    """Groups by state: ``open``, ``ready``, ``leased``, ``acked``, ``discarded``."""
    discarded: dict[str, int] = {}
    """Discarded groups by reason."""
    samples: dict[str, int] = {}
    """Samples by what became of them, and how many are buffered."""
    outcomes: dict[str, int] = {}
    """Rollouts by how they ended, since the server started: ``ok``, ``truncated``, ``engine_failure``, …"""
    counts: dict[str, int] = {}
    """What its processes count, by name."""
    tokens: dict[str, Any] = {}
    """Tokens ``kept`` and ``wasted``; ``mean_finished`` and ``mean_aborted``, tokens per rollout."""
    settings: dict[str, Any] = {}


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the run knows."""

    step: int
    batch_ids: list[str]
    num_groups: int = 0
    at_s: float = 0.0
    """Seconds since the Unix epoch."""


class CheckpointResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint fixed: ``batch_ids`` are all of this step, ``checkpoints`` all known steps, ascending."""

    step: int
    batch_ids: list[str]
    checkpoints: list[int]


class RewindResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rewind undid: so many batches, so many groups that are ready again."""

    step: int | None
    num_batches: int
    num_groups: int
    checkpoints: list[int]
