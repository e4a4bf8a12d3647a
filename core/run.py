"""A run: its parameters, its state, where its current step began, and what its processes have counted."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, get_args

from msgspec.structs import asdict
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from forebay.core.errors import InvalidInput
from forebay.core.fields import wrong_field
from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange
from forebay.core.ids import InstanceId
from forebay.core.outcome import RewardTally
from forebay.core.records.rows import RunRow, StartRow
from forebay.core.scheduling.oversampling import FIELD_HINTS as OVERSAMPLING_HINTS
from forebay.core.scheduling.oversampling import Oversampling
from forebay.core.scheduling.scheduler import FIELD_HINTS as SCHEDULER_HINTS
from forebay.core.scheduling.scheduler import Scheduler
from forebay.core.starts.asked_arrays import HINT as ARRAYS_HINT
from forebay.core.starts.asked_arrays import AskedArrays
from forebay.core.starts.evaluate import HINTS as EVALUATE_HINTS
from forebay.core.starts.evaluate import Evaluate, Evaluates
from forebay.core.starts.run_start import RunStart
from forebay.core.weight_versions import AnnouncedWeights


@dataclass(frozen=True, slots=True)
class StepStart:
    """State of a run when another weight version was announced; a step lasts until the next announcement."""

    number: int = 0
    """Number of announcements so far."""
    num_closed: int = 0
    """Groups that had left the open state."""
    full: list[str] = field(default_factory=list)
    """Ids of the open groups whose slots were all filled; they belong to the previous step."""
    weight_version: int | None = None
    """The announced version; None before the first. A rewind keeps it, because the engines keep their weights."""


@dataclass(slots=True)
class Tally:
    """Totals over a run's processes. Each process reports its own totals repeatedly; earlier processes are added."""

    process_id: str = ""
    current: dict[str, int] = field(default_factory=dict)
    """Last report of the current process."""
    earlier: dict[str, int] = field(default_factory=dict)
    """Sum over all earlier processes."""

    def report(self, process_id: str, counts: Mapping[str, int]) -> bool:
        """Store a process's current counts; return whether anything changed. Repeated reports are harmless."""
        # Another process: the counts of the previous one are final.
        if process_id != self.process_id:
            self.earlier, self.current, self.process_id = dict(self.totals), {}, process_id
        is_changed = self.current != counts
        self.current = dict(counts)
        return is_changed

    @property
    def totals(self) -> Counter[str]:
        """Sum over all processes."""
        # Adding counters drops zero counts, so they are not shown.
        return Counter(self.earlier) + Counter(self.current)


Contract = Literal["A", "B"]
Origin = Literal["slime", "native"]
Ratio = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]

BackendName = Literal["inline", "processes", "ray"]
DEFAULT_BACKEND: BackendName = "processes"
WORKER_HINTS = {
    "workers": "a number, for example 4, or a list with a number for each node, for example [2, 4]",
    "backend": f"one of {', '.join(get_args(BackendName))}",
}
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{0,64}")


class RunState(StrEnum):
    """State of a run. Independently of it, a run *has ended* once it will deliver nothing more."""

    VALIDATING = "validating"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


WORKING = frozenset({RunState.VALIDATING, RunState.RUNNING})
"""States in which a run process exists or is about to."""
LOST_START = "the parameters of its start are lost: their record on disk is damaged; start a new run"


def _read_range(value: Any) -> RewardRange:
    try:
        low, high = map(float, value if isinstance(value, list | tuple) else ())
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("must be a list [low, high] of two finite numbers, low below high, or null for any finite reward")


def _read_counts(value: Any) -> Any:
    """Accept numbers as strings, as a command line or slime's client sends them. A single count means one node."""
    counts = value if isinstance(value, list | tuple) else [value]
    read = [_read_count(each) for each in counts]
    if not read:
        raise ValueError("must have at least one node's count")
    return read


def _read_count(value: object) -> int:
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    try:
        count = int(value) if is_number else 0  # type: ignore[call-overload]
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError("must be a whole number of at least 1 for each node")
    return int(count)


WorkerCounts = Annotated[list[int], BeforeValidator(_read_counts)]
"""Worker counts, one per node."""


class RunSettings(BaseModel):
    """How a run's groups are formed, closed and read. Numbers may be strings, as slime's client sends them."""

    # Reads the whole payload of a start; unknown fields belong to the generator.
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    # The alias is slime's name for it.
    group_size: int = Field(alias="num_repeat_per_sample", ge=1, le=65_536)
    """Slots of a group."""
    min_valid_group_size_ratio: Ratio = 1.0
    """Smallest share of the group size with which a group is valid."""
    min_valid_item_size_ratio: Ratio = 0.7
    """Share of the group size that must remain after ``filter_item``."""
    group_timeout_seconds: Seconds = 300.0
    """Seconds without a new sample after which a group is closed."""
    group_deadline_seconds: Seconds = 3_600.0
    """Seconds from the opening of a group until it is closed."""
    min_timeout_group_size_ratio: Ratio = 0.7
    """Share of the group size with which a timed-out group is still used."""
    max_buffer_size: int = Field(default=1_000_000_000, ge=1)
    """Number of samples in open, ready and leased groups at which new groups are rejected."""
    max_buffer_bytes: int = Field(default=1 << 40, ge=1)
    """Bytes of samples in open, ready and leased groups at which new groups are rejected."""
    max_array_bytes: int = Field(default=512 << 20, ge=0)
    """Maximum bytes of the parts of one sample (see arrays.md)."""
    legacy_read_max_bytes: int = Field(default=256 << 20, ge=1)
    """Maximum bytes in a slime reply to a read without ``batch_size``; it always has at least one group."""
    legacy_read_max_groups: int | None = Field(default=None, ge=1)
    """Maximum groups in a slime reply to a read without ``batch_size``."""
    hook_time_limit_s: Seconds = 60.0
    """Maximum seconds for one call of a user's hook."""
    meta_max_samples: int = Field(default=100_000, ge=1)
    """Number of newest samples passed to a user's ``get_group_data_meta_info``."""
    normaliser: Normaliser = "grpo"
    """How the built-in ``normalize_group_data`` turns rewards into advantages."""
    reward_range: Annotated[RewardRange, BeforeValidator(_read_range)] | None = None
    """Rewards that built-in hooks keep, ``[low, high]``; null for any finite one. ``/start_rollout`` defaults to
    ``[0, 1]``."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum staleness of a group, in weight versions; a read may override it."""
    stale_groups: Literal["discard", "keep"] = "discard"
    """Whether groups above `max_staleness` are discarded or delivered; their rows are then marked ``is_stale``."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Number of newest checkpoints that a rewind can reach; their samples' bodies are kept."""
    keep_bodies: bool = False
    """Whether bodies that no checkpoint needs are kept, with their parts, even beyond the server's `replay_bytes`."""
    alarm_after_groups: int = Field(default=64, ge=1)
    """Number of undelivered groups in a row that raises an alarm."""
    alarm_lost_ratio: Ratio = 0.1
    """Share of lost groups above which an alarm is raised, once 20 groups have finished; 1 disables it."""
    trace_rate: Ratio = 1.0
    """Share of groups whose spans are traced in full; a summary of each rollout is always kept."""
    oversampling: Oversampling | None = None
    """Extra rollouts beyond a step's needs (see generators.md): `rollouts_per_group`, `groups_per_step`, `leftover`."""
    scheduler: Scheduler | None = None
    """Which rollout starts next, and on which engine (see scheduling.md): `policy` and its parameters."""
    workers: WorkerCounts | None = None
    """Number of processes that run the rollouts (see run_workers.md), or a list with one number per node."""
    backend: BackendName | None = None
    """Where they run: `processes` on this machine (the default), a `ray` cluster, or `inline`, for debuggers."""
    policy_models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Models whose tokens are trained on, an adapter as `model:adapter`; by default, the models of all calls."""
    arrays: list[str] | None = None
    """Arrays per token that engines are asked for (see arrays.md): `routed_experts`, `sampling_mask`,
    `top_logprobs:K`."""
    restore_reasoning: bool = False
    """Whether the gateway puts the reasoning that agents drop back into their histories (see gateway.md)."""
    evaluate: Evaluate | None = None
    """Evaluations beside the training (see evaluation.md): `tasks`, `every`, `on_update`, `hold_s`."""
    contract: Contract | None = None
    """Which of slime's contracts the generator file follows; detected if absent."""

    @classmethod
    def parse(cls, payload: dict[str, Any], origin: Origin = "native") -> Self:
        """Read the settings from a start payload. Raises ``InvalidInput`` for the first invalid field.

        ``origin`` is the route of the start. Null means the default, except for ``reward_range``: no range.
        """
        given = {key: value for key, value in payload.items() if value is not None}
        if origin == "slime" and "reward_range" not in payload:
            given["reward_range"] = SLIME_REWARD_RANGE
        if origin == "slime" and "rollout_batch_size" in given:  # slime's client trains on this many groups per fetch
            given.setdefault("legacy_read_max_groups", given["rollout_batch_size"])
        try:
            settings = cls.model_validate(given)
        except ValidationError as error:
            hints = {**SCHEDULER_HINTS, **OVERSAMPLING_HINTS, **WORKER_HINTS, **EVALUATE_HINTS, "arrays": ARRAYS_HINT}
            raise wrong_field(error.errors(include_url=False)[0], hints) from None
        if settings.oversampling is not None:
            settings.oversampling.checked(settings.group_size)
        AskedArrays.parse(settings.arrays)
        return settings

    @property
    def min_valid_group_size(self) -> int:
        """Minimum number of samples in a valid group; rounded down, as in slime, but at least 1."""
        return max(1, int(self.group_size * self.min_valid_group_size_ratio))

    @property
    def min_valid_item_size(self) -> int:
        """Minimum number of samples after ``filter_item``; rounded down, as in slime, but at least 1."""
        return max(1, int(self.group_size * self.min_valid_item_size_ratio))


@dataclass(slots=True)
class Run:
    """One started rollout job, shared by the buffer and the server. All of it is journalled."""

    run_id: str
    run_key: str
    name: str
    origin: Origin
    task_type: str
    settings: RunSettings
    start: RunStart
    """Parameters of the last start, stored separately because reports do not change them."""
    created_at_s: float
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults applied by the server, at the last start, for fields missing from the payload."""
    started_at_s: float = 0.0
    """Unix time in seconds of the last start or attachment."""
    state: RunState = RunState.VALIDATING
    reason: str = ""
    """Why it stopped or failed; with a traceback if there is one."""
    has_ended: bool = False
    generator_path: str = ""
    generator_sha256: str = ""
    generator_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by name of the files that ``generator_sha256`` covers."""
    generator_hooks: list[str] = field(default_factory=list)
    """The hooks that the generator file implements."""
    generator_contract: Contract | None = None
    """The contract that the file itself declares."""
    num_starts: int = 0
    """Number of starts and attachments; each has its own copy of the generator's code."""
    is_native_generator: bool = False
    """Whether the generator uses Forebay's base class, which asks for its missing slots."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about its start, samples and reads."""
    input_fingerprint: str = ""
    """Inode, size in bytes and change time of the input file at the last start; "" without a file."""
    input_sha256: str = ""
    """SHA-256 in hex of the input file at the last start; "" without a file, or until it is computed."""
    has_delivered: bool = False
    """Whether a batch was delivered since the last start or attachment."""
    is_last_slot_reported: bool = False
    is_waiting_for_engine: bool = False
    is_gateway_waiting: bool = False
    """Whether no engine answers its agents' calls through the gateway."""
    is_held: bool = False
    """Whether its step has all the groups it needs, so that the process waits for the trainer's next weights."""
    is_paused: bool = False
    """Whether its engines are paused, by its trainer or for a weight update."""
    num_groups_total: int | None = None
    """Number of groups that the base generator will open; None if unknown."""
    weight_version: int | None = None
    """Version last announced by the trainer, or that of the checkpoint it rewound to; None if unknown."""
    step: StepStart = field(default_factory=StepStart)
    """The step that began with the last announcement."""
    weights: AnnouncedWeights = field(default_factory=AnnouncedWeights)
    """The last announcement; a rewind does not change it."""
    tally: Tally = field(default_factory=Tally)
    """Counts reported by its own processes."""
    gateway_tally: Tally = field(default_factory=Tally)
    """Counts reported by gateways for it."""
    samples: Counter[str] = field(default_factory=Counter)
    """Accepted samples by outcome, their bytes, and rows delivered and cut."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rollouts by how they ended. Forks count as part of their rollout."""
    rewards: RewardTally = field(default_factory=RewardTally)
    """Rewards of rollouts that are in a group."""
    reward_parts: dict[str, RewardTally] = field(default_factory=dict)
    """The named parts of these rewards."""
    process_ended_s: float | None = None
    """Active seconds at which the run process ended."""
    replay: dict[str, Any] | None = None
    """For a run that replays another: ``source`` (its run or file), ``recorded_at_s``, ``differences``."""
    evaluates: Evaluates | None = None
    """What it evaluates; None for other runs. Its groups are never delivered."""
    evaluation: dict[str, Any] | None = None
    """The result of an evaluation that is over."""
    is_fed: bool = False
    """Whether the server writes a recording into it; it then has no process."""

    @property
    def payload(self) -> dict[str, Any]:
        """The start payload without its list; the generator gets it with the list and its own ``remote_buffer_url``."""
        return self.start.payload

    @property
    def base_skip(self) -> Sequence[InstanceId]:
        """Ids (with multiplicity) that the current process skips in addition to this run's own groups."""
        return self.start.base_skip

    @property
    def is_alive(self) -> bool:
        """Whether the run has not failed, stopped or ended."""
        return not self.has_ended and self.state not in (RunState.FAILED, RunState.STOPPED)

    @property
    def counts_groups(self) -> bool:
        """Whether the run is held once a step has its groups."""
        oversampling = self.settings.oversampling
        return oversampling is not None and oversampling.groups_per_step is not None

    @property
    def counts(self) -> Counter[str]:
        """Counts of its own processes and the gateways together."""
        return self.tally.totals + self.gateway_tally.totals

    def document(self) -> dict[str, Any]:
        """The run as JSON values, without its start and the columns of a ``RunRow``."""
        document: dict[str, Any] = _stored.dump_python(self, mode="json", by_alias=True, exclude=_STORED_APART)
        return document

    @classmethod
    def restore(cls, row: RunRow, start: StartRow | None) -> "Run":
        """Load a stored run."""
        values = row.document | asdict(row) | {"start": RunStart.restore(start.document) if start else RunStart({})}
        # Its existing groups can still be delivered, but a process would lack its parameters.
        if start is None and row.state in WORKING:
            values |= {"state": RunState.FAILED, "reason": LOST_START, "process_ended_s": 0.0}
        return _stored.validate_python(values)


_stored = TypeAdapter(Run)
_STORED_APART = {"run_id", "name", "task_type", "state", "created_at_s", "start"}


def check_name(name: str) -> str:
    """Return ``name`` if it can be a run's name (up to 64 of ``A-Z a-z 0-9 . _ -``); else raise ``InvalidInput``."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(f"a name may have up to 64 of the characters A-Z a-z 0-9 . _ - (got {name!r})", field="name")
    return name
