"""The data a trainer receives: batches and groups, and replies about runs, checkpoints and weights."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.weight_versions import PauseMode
from forebay.telemetry.numbers import counted

Row: TypeAlias = dict[str, Any]
"""A sample from the buffer: the written fields, with ``reward`` normalised and the original in ``raw_reward``."""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one instance in one epoch."""

    instance_id: InstanceId
    """Id of the task row, as its generator names it."""
    samples: Sequence[Row]
    """The rows of the group, with those that a hook added to fill it."""
    group_id: str = ""
    """The server's id of the group."""


@dataclass(frozen=True)
class Batch:
    """Whole groups, leased to one reader until it checkpoints, acks or releases them, or the lease expires."""

    batch_id: str
    """The server's id of the batch."""
    rows: Sequence[Row]
    """The samples of all groups; those of a group are adjacent."""
    meta_info: dict[str, Any]
    """Statistics of all samples that arrived since the last batch, computed by the run's hook."""
    lease_s: float
    """Seconds for which the batch is leased; the client extends the lease by itself."""
    group_sizes: Sequence[int]
    """Number of rows in each group. Sizes may differ, and two epochs of an instance may be adjacent."""
    step: int | None = None
    """The training step given when the batch was read."""
    foreign_rows: Collection[int] = ()
    """Indices of rows from writers that know nothing of Forebay. In them, ``rollout_id``, ``outcome``, ``fork``,
    ``epoch`` and ``slot`` may have another meaning."""
    content: bytes = field(default=b"", repr=False)
    """The tensors of a batch read with ``as_tensors``; its rows omit ``tokens``, ``logprobs`` and ``loss_mask``."""
    group_ids: Sequence[str] = ()
    """The server's ids of the groups."""
    wait_s: float = 0.0
    """Seconds that the read took, waiting included."""

    @property
    def num_groups(self) -> int:
        """Number of groups, those without rows included."""
        return len(self.group_sizes)

    def _repr_html_(self) -> str:
        """In a notebook: a table of its first rows."""
        from forebay.client.notebook import batch_html  # which trainers do not need

        step = "" if self.step is None else f" for step {self.step}"
        return batch_html(f"Batch {self.batch_id}{step}: {counted(self.num_groups, 'group')}", self.rows)

    @cached_property
    def groups(self) -> list[Group]:
        """The rows by group, oldest ready group first. Groups that a hook left without rows are omitted."""
        bounds = pairwise(accumulate(self.group_sizes, initial=0))
        named = zip(bounds, self.group_ids or [""] * self.num_groups, strict=True)
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
    """A sign that something is wrong with a run: too many groups ended undelivered, consecutively or in total."""

    message: str
    """What happened, and what to do about it."""
    reasons: dict[str, int]
    """Number of groups by the reason for which they ended."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a run's weights, which is a run of its own."""

    run_id: str
    """The id of the evaluation's own run."""
    task: str
    """Its name in the ``evaluate.tasks`` of the training run."""
    step: int
    """The training step that it was started for."""
    weight_version: int | None
    """The version of the weights that it evaluates, if the trainer announces versions."""
    state: str
    """``running``, ``finished``, ``stopped`` (by a weight update or a user) or ``failed``."""
    reason: str = ""
    """Why it stopped or failed."""
    num_rollouts: int | None = None
    """Number of rollouts it consists of; None until its process has counted them."""
    num_counted: int = 0
    """Rollouts that the numbers below are about; while it is running, those that have not failed."""
    num_failed: int = 0
    """Failed rollouts. They count as nothing, not as reward 0."""
    num_other_weights: int = 0
    """Rollouts that do not count because they name other weights, or several versions."""
    mean: dict[str, float | None] | None = None
    """``value`` of the mean reward, ``low`` and ``high`` of its 95 % interval; None while it is running."""
    pass_at: dict[str, dict[str, float | None]] = {}
    """The same of pass@k, by k as text: the chance that at least one of k rollouts has a reward of 1 or more."""


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """State and statistics of a run, from ``GET /v1/runs/{run_id}``."""

    run_id: str
    """The server's id of the run."""
    task_type: str
    """The task type of its generator."""
    state: str
    """``validating``, ``running``, ``finished``, ``stopped`` or ``failed``."""
    has_ended: bool
    """Whether the run has stopped producing groups; ready ones can still be read."""
    name: str = ""
    """The name given at its start; empty without one."""
    reason: str = ""
    """Why the run stopped or failed."""
    engine_urls: list[str] = []
    """The engines given at its start."""
    warnings: list[str] = []
    """Warnings about its start (misspelt fields) and its samples (no token ids)."""
    is_waiting_for_engine: bool = False
    """Whether none of its engines responds. Deadlines are paused meanwhile."""
    is_held: bool = False
    """Whether the run waits for the trainer's next weight version: its step has all the groups that it needs."""
    is_paused: bool = False
    """Whether its engines are paused, until the trainer or the server resumes them."""
    is_stalled: bool = False
    """Whether it has an alarm."""
    alarm: Alarm | None = None
    """Why the run will probably deliver nothing; None while groups are delivered."""
    weight_version: int | None = None
    """The weight version that its trainer announced last."""
    created_at_s: float = 0.0
    """Seconds since the Unix epoch."""
    num_groups_total: int | None = None
    """Total number of groups of the run, if its generator knows it."""
    groups: dict[str, int] = {}
    """Number of groups by state: ``open``, ``ready``, ``leased``, ``acked``, ``discarded``."""
    num_groups_full: int = 0
    """Open groups whose slots are all filled; the next read calls ``is_valid_group`` for them."""
    num_groups_idle: int = 0
    """Open groups without a rollout in flight; they do not age."""
    discarded: dict[str, int] = {}
    """Number of discarded groups by reason."""
    samples: dict[str, int] = {}
    """Number of samples by outcome, and of those buffered now."""
    outcomes: dict[str, int] = {}
    """Number of rollouts by outcome: ``ok``, ``truncated``, ``engine_failure``, …"""
    rewards: dict[str, float | None] = {}
    """``num``, ``mean``, ``min`` and ``max`` of the rewards of samples in groups."""
    reward_parts: dict[str, dict[str, float]] = {}
    """The same of each named part of these rewards."""
    counts: dict[str, int] = {}
    """Counters of the run's processes, by name."""
    tokens: dict[str, Any] = {}
    """Tokens ``kept`` and ``wasted``; ``mean_finished`` and ``mean_aborted``, tokens per rollout."""
    settings: dict[str, Any] = {}
    """The settings of the run, defaults included."""
    evaluations: list[Evaluation] = []
    """The evaluations of the run, by step."""
    sampling_params: dict[str, Any] = {}
    """The sampling parameters that the run was started with."""

    def _repr_html_(self) -> str:
        """In a notebook: a table of its state and statistics."""
        from forebay.client.notebook import run_html  # which trainers do not need

        return run_html(msgspec.to_builtins(self))


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run."""

    step: int
    """The trainer's number for it."""
    batch_ids: list[str]
    """The batches that this checkpoint added to the earlier ones."""
    num_groups: int = 0
    """Number of groups in those batches."""
    at_s: float = 0.0
    """Seconds since the Unix epoch."""


class CheckpointResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a checkpoint."""

    step: int
    """The step of the checkpoint."""
    batch_ids: list[str]
    """All batches of this step, those of an earlier call for it included."""
    checkpoints: list[int]
    """The steps of all checkpoints of the run, ascending."""


class RewindResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rewind."""

    step: int | None
    """The checkpoint that the run was rewound to; None for its beginning."""
    num_batches: int
    """Number of batches that now count as never read."""
    num_groups: int
    """Number of groups that are ready again."""
    checkpoints: list[int]
    """The steps of the remaining checkpoints, ascending."""


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A weight update that all engines of the run completed."""

    weight_version: int
    """The version the engines have now."""
    mode: PauseMode
    """How calls in flight were handled."""
    workers: list[str]
    """The addresses of the engines; behind a router those of its workers."""
    paused_s: float
    """Seconds for which the engines were paused."""


class EnginePause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of the engines of a run."""

    mode: PauseMode
    """How calls in flight were handled."""
    limit_s: float
    """Seconds after which the engines resume by themselves."""
    workers: list[str]
    """The addresses of the engines; behind a router those of its workers."""
