"""What a trainer gets: batches and groups, and the server's answers about runs, checkpoints and weights."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.weight_versions import PauseMode

Row: TypeAlias = dict[str, Any]
"""A sample as the reader gets it: what was written, with ``reward`` normalised and ``raw_reward`` as it was."""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one instance in one epoch."""

    instance_id: InstanceId
    """The task row, as its generator names it."""
    samples: Sequence[Row]
    """Their rows, with those that a hook added to fill the group."""
    group_id: str = ""
    """What the server knows it by."""


@dataclass(frozen=True)
class Batch:
    """Whole groups that are this reader's until it checkpoints, acks or releases them, or its lease runs out."""

    batch_id: str
    """What the server knows it by."""
    rows: Sequence[Row]
    """The samples of all groups; those of a group are adjacent."""
    meta_info: dict[str, Any]
    """What the run's hook tells of all that arrived since the last batch."""
    lease_s: float
    """For how many seconds it is leased; its client extends that by itself."""
    group_sizes: Sequence[int]
    """Rows of each group: they need not be equally many, and two epochs of an instance may stand side by side."""
    step: int | None = None
    """The step that the batch was asked for."""
    foreign_rows: Collection[int] = ()
    """The places of rows in which ``rollout_id``, ``outcome``, ``fork``, ``epoch`` and ``slot`` may mean something
    else: who wrote them knows nothing of Forebay."""
    content: bytes = field(default=b"", repr=False)
    """The tensors of a batch that came as such: its rows are without ``tokens``, ``logprobs`` and ``loss_mask``."""
    group_ids: Sequence[str] = ()
    """What the server knows each group by."""

    @property
    def num_groups(self) -> int:
        """How many groups it has, those without rows included."""
        return len(self.group_sizes)

    @cached_property
    def groups(self) -> list[Group]:
        """The rows by group, oldest ready group first. One that a hook left without rows is not among them."""
        places = pairwise(accumulate(self.group_sizes, initial=0))
        named = zip(places, self.group_ids or [""] * self.num_groups, strict=True)
        return [
            Group(self.rows[start]["instance_id"], self.rows[start:end], key)
            for (start, end), key in named
            if start < end
        ]


BatchLike: TypeAlias = Batch | str
"""A batch or its id."""


def batch_ids(batches: BatchLike | Iterable[BatchLike]) -> list[str]:
    """The ids of one batch or of several."""
    given = [batches] if isinstance(batches, Batch | str) else batches
    return [batch.batch_id if isinstance(batch, Batch) else batch for batch in given]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """So many groups ended undelivered, in a row or in all, that something must be wrong; ``message`` says what."""

    message: str
    """What happened, and what to do about it."""
    reasons: dict[str, int]
    """Groups by why they ended."""


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers, as ``GET /v1/runs/{run_id}`` shows it."""

    run_id: str
    """What the server knows it by."""
    task_type: str
    """Which generator it runs."""
    state: str
    """``validating``, ``running``, ``finished``, ``stopped`` or ``failed``."""
    has_ended: bool
    """Nothing will come from it any more; what is ready can still be read."""
    name: str = ""
    """The name that its start gave it; empty without one."""
    reason: str = ""
    """Why it stopped or failed."""
    engine_urls: list[str] = []
    """The engines that it was started with."""
    warnings: list[str] = []
    """Warnings about its start (misspelt fields) and its samples (no token ids)."""
    is_waiting_for_engine: bool = False
    """None of its engines answers; its deadlines stand still meanwhile."""
    is_held: bool = False
    """It waits for the trainer's next weight version: its step has all the groups that it needs."""
    is_paused: bool = False
    """Its engines stand still, until its trainer or the server lets them go on."""
    is_stalled: bool = False
    """It has an alarm."""
    alarm: Alarm | None = None
    """Why probably nothing will come of it; none as long as groups are delivered."""
    weight_version: int | None = None
    """What its trainer announced last."""
    created_at_s: float = 0.0
    """Seconds since the Unix epoch."""
    num_groups_total: int | None = None
    """Groups that it will have in all, where its generator knows."""
    groups: dict[str, int] = {}
    """Groups by state: ``open``, ``ready``, ``leased``, ``acked``, ``discarded``."""
    num_groups_full: int = 0
    """The open ones whose slots are all filled: the next read asks ``is_valid_group`` about them."""
    num_groups_idle: int = 0
    """The open ones that do not age: none of their rollouts is in flight."""
    discarded: dict[str, int] = {}
    """Discarded groups by reason."""
    samples: dict[str, int] = {}
    """Samples by what became of them, and how many are buffered."""
    outcomes: dict[str, int] = {}
    """Rollouts by how they ended: ``ok``, ``truncated``, ``engine_failure``, …"""
    rewards: dict[str, float | None] = {}
    """``num``, ``mean``, ``min`` and ``max`` of the samples in groups."""
    counts: dict[str, int] = {}
    """What its processes count, by name."""
    tokens: dict[str, Any] = {}
    """Tokens ``kept`` and ``wasted``; ``mean_finished`` and ``mean_aborted``, tokens per rollout."""
    settings: dict[str, Any] = {}
    """The settings of its start, with those that it left to their defaults."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the run knows."""

    step: int
    """The trainer's number for it."""
    batch_ids: list[str]
    """The batches that this checkpoint fixed, and no earlier one."""
    num_groups: int = 0
    """Groups in those batches."""
    at_s: float = 0.0
    """Seconds since the Unix epoch."""


class CheckpointResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint fixed."""

    step: int
    """The step that it was made for."""
    batch_ids: list[str]
    """All batches of this step, those of an earlier call for it included."""
    checkpoints: list[int]
    """The steps of all checkpoints that the run knows, ascending."""


class RewindResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rewind undid."""

    step: int | None
    """The checkpoint that the run is back at; none for its beginning."""
    num_batches: int
    """Batches that count as never read."""
    num_groups: int
    """Groups that are ready again."""
    checkpoints: list[int]
    """The steps of the checkpoints that are left, ascending."""


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """An update that all engines of the run took."""

    weight_version: int
    """What the engines have now."""
    mode: PauseMode
    """What became of the calls in flight."""
    workers: list[str]
    """The addresses of the engines; behind a router those of its workers."""
    paused_s: float
    """How long they stood still."""


class EnginePause(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that stand still, idle."""

    mode: PauseMode
    """What became of the calls in flight."""
    limit_s: float
    """After so many seconds they go on by themselves."""
    workers: list[str]
    """Their addresses; behind a router those of its workers."""
