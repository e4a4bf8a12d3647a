"""A run: what was asked for, where it is, where its present step began, and what its processes have counted."""

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
from forebay.core.starts.run_start import RunStart
from forebay.core.weight_versions import AnnouncedWeights


@dataclass(frozen=True, slots=True)
class StepStart:
    """Where a run was when another weight version was announced: from one to the next lies a step."""

    number: int = 0
    """How often one was."""
    num_closed: int = 0
    """Groups that had left the open state."""
    full: list[str] = field(default_factory=list)
    """Ids of the open groups whose slots were all filled: they belong to the step before."""
    weight_version: int | None = None
    """That version; None before the first. A rewind leaves it: the engines have it until another is announced."""


@dataclass(slots=True)
class Tally:
    """Each process of a run reports its own totals, again and again; those of the processes before it are added."""

    process_id: str = ""
    current: dict[str, int] = field(default_factory=dict)
    """What the process of this id reported last."""
    earlier: dict[str, int] = field(default_factory=dict)
    """The sum over all processes before it."""

    def report(self, process_id: str, counts: Mapping[str, int]) -> bool:
        """Take what a process counts by now; whether that changes anything. A report may come twice."""
        # Another process: what the one before it counted is final.
        if process_id != self.process_id:
            self.earlier, self.current, self.process_id = dict(self.totals), {}, process_id
        is_news = self.current != counts
        self.current = dict(counts)
        return is_news

    @property
    def totals(self) -> Counter[str]:
        """All processes together."""
        # Adding counters drops what is zero, so that nobody is shown what never happened.
        return Counter(self.earlier) + Counter(self.current)


Contract = Literal["A", "B"]
Origin = Literal["slime", "native"]
Ratio = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]

BackendName = Literal["inline", "processes", "ray"]
DEFAULT_BACKEND: BackendName = "processes"
WORKER_HINTS = {
    "workers": "a count, as 4, or a list with the count of each node, as [2, 4]",
    "backend": f"one of {', '.join(get_args(BackendName))}",
}
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{0,64}")


class RunState(StrEnum):
    """Where a run is. Independently of it, a run *has ended* once nothing will come from it any more."""

    VALIDATING = "validating"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


WORKING = frozenset({RunState.VALIDATING, RunState.RUNNING})
"""The states in which a run process exists, or is about to."""
LOST_START = "what it was started with is lost: its record on the disk is damaged; start it anew"


def _read_range(value: Any) -> RewardRange:
    try:
        low, high = map(float, value if isinstance(value, list | tuple) else ())
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("must be a list [low, high] of two finite numbers, low below high, or null for any finite reward")


def _read_counts(value: Any) -> Any:
    """Numbers may be strings, as a command line or slime's client sends them. A single count is that of one node."""
    counts = value if isinstance(value, list | tuple) else [value]
    read = [_read_count(each) for each in counts]
    if not read:
        raise ValueError("names no node")
    return read


def _read_count(value: object) -> int:
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    try:
        count = int(value) if is_number else 0  # type: ignore[call-overload]
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError("must be at least 1 for each node, and whole")
    return int(count)


WorkerCounts = Annotated[list[int], BeforeValidator(_read_counts)]
"""By node."""


class RunSettings(BaseModel):
    """How a run's groups are formed, ended and read. Numbers may arrive as strings, as slime's client sends them."""

    # The whole payload of a start is read: the rest of it is the generator's.
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
    """Samples of open, ready and leased groups, at which new groups are rejected."""
    max_buffer_bytes: int = Field(default=1 << 40, ge=1)
    """Bytes of the same samples, at which new groups are rejected."""
    legacy_read_max_bytes: int = Field(default=256 << 20, ge=1)
    """Bytes of one slime reply to a read without ``batch_size``; it has at least one group."""
    legacy_read_max_groups: int | None = Field(default=None, ge=1)
    """Most groups in one such reply."""
    hook_time_limit_s: Seconds = 60.0
    """Seconds that one call of a user's hook may take."""
    meta_max_samples: int = Field(default=100_000, ge=1)
    """Number of newest samples passed to a user's ``get_group_data_meta_info``."""
    normaliser: Normaliser = "grpo"
    """How the built-in ``normalize_group_data`` turns rewards into advantages."""
    reward_range: Annotated[RewardRange, BeforeValidator(_read_range)] | None = None
    """Rewards that built-in hooks keep, ``[low, high]``; null for any finite one. ``/start_rollout`` defaults to
    ``[0, 1]``."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest staleness of a group, in weight versions; a read may override it."""
    stale_groups: Literal["discard", "keep"] = "discard"
    """Whether groups above that bound are discarded or delivered; delivered ones have ``is_stale`` in each row."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Number of newest checkpoints that a rewind can reach: their samples' bodies are kept."""
    keep_bodies: bool = False
    """Whether bodies that no checkpoint needs are kept for replays, even above the server's `replay_bytes`."""
    alarm_after_groups: int = Field(default=64, ge=1)
    """Undelivered groups in a row that raise an alarm."""
    alarm_lost_ratio: Ratio = 0.1
    """Share of lost groups, of at least 20 finished, above which an alarm is raised; 1 for never."""
    trace_rate: Ratio = 1.0
    """Share of the groups whose spans a trace keeps in full; a summary of each rollout is always kept."""
    oversampling: Oversampling | None = None
    """More rollouts than a step needs (see generators.md): `rollouts_per_group`, `groups_per_step`, `leftover`."""
    scheduler: Scheduler | None = None
    """Which rollout is started next, and on which engine (see scheduling.md): `policy` and its parameters."""
    workers: WorkerCounts | None = None
    """Processes that run its rollouts (see run_workers.md): a number, or a list with the number for each node."""
    backend: BackendName | None = None
    """Where these run: `processes` on this machine (the default), a `ray` cluster, or `inline`, for debuggers."""
    policy_models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Models whose tokens are trained on, an adapter as `model:adapter`; by default, those of every call."""
    contract: Contract | None = None
    """Which of slime's contracts the generator file follows; detected if absent."""

    @classmethod
    def parse(cls, payload: dict[str, Any], origin: Origin = "native") -> Self:
        """Read the settings out of a start payload. Raises ``InvalidInput`` with the first wrong field.

        ``origin`` is how the start came. What is null has its default, but for a ``reward_range``: that is none at all.
        """
        given = {key: value for key, value in payload.items() if value is not None}
        if origin == "slime" and "reward_range" not in payload:
            given["reward_range"] = SLIME_REWARD_RANGE
        if origin == "slime" and "rollout_batch_size" in given:  # slime's client trains on so many groups of a fetch
            given.setdefault("legacy_read_max_groups", given["rollout_batch_size"])
        try:
            settings = cls.model_validate(given)
        except ValidationError as error:
            hints = {**SCHEDULER_HINTS, **OVERSAMPLING_HINTS, **WORKER_HINTS}
            raise wrong_field(error.errors(include_url=False)[0], hints) from None
        if settings.oversampling is not None:
            settings.oversampling.checked(settings.group_size)
        return settings

    @property
    def min_valid_group_size(self) -> int:
        """Rounded down, as in slime, but at least 1."""
        return max(1, int(self.group_size * self.min_valid_group_size_ratio))

    @property
    def min_valid_item_size(self) -> int:
        """Rounded down, as in slime, but at least 1."""
        return max(1, int(self.group_size * self.min_valid_item_size_ratio))


@dataclass(slots=True)
class Run:
    """One started rollout job, as the buffer and the server share it. Everything here is journalled."""

    run_id: str
    run_key: str
    name: str
    origin: Origin
    task_type: str
    settings: RunSettings
    start: RunStart
    """What it was last started with: stored apart, since it does not change with what is reported."""
    created_at_s: float
    defaults: dict[str, Any] = field(default_factory=dict)
    """What of its payload the caller did not say: the server had these defaults when the run was last started."""
    started_at_s: float = 0.0
    """When it was last started or attached to, in seconds since the Unix epoch."""
    state: RunState = RunState.VALIDATING
    reason: str = ""
    """Why it stopped or failed; with a traceback where there is one."""
    has_ended: bool = False
    generator_path: str = ""
    generator_sha256: str = ""
    generator_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by name of the files that ``generator_sha256`` covers."""
    generator_hooks: list[str] = field(default_factory=list)
    """The hooks that the generator file implements."""
    generator_contract: Contract | None = None
    """What the file itself declares."""
    num_starts: int = 0
    """Start and attachments; each has its own copy of the generator's code."""
    is_native_generator: bool = False
    """Whether the generator uses our base, which asks for its missing slots."""
    warnings: list[str] = field(default_factory=list)
    """What its start, its samples and its reads were warned about."""
    input_fingerprint: str = ""
    """What its input file's inode, size in bytes and time of change were at its last start; "" without one."""
    input_sha256: str = ""
    """Of the input file's bytes then, in hex; "" without a file, and until it is known."""
    has_delivered: bool = False
    """Whether a batch went out since the last start or attachment."""
    is_last_slot_reported: bool = False
    is_waiting_for_engine: bool = False
    is_gateway_waiting: bool = False
    """Whether no engine answers the calls that its agents make through the gateway."""
    is_held: bool = False
    """Whether its step has all the groups that it needs: the process waits for the trainer's next weights."""
    is_paused: bool = False
    """Whether its engines stand still on its trainer's word, or while they are given other weights."""
    num_groups_total: int | None = None
    """What the base generator says it will open; None when unknown."""
    weight_version: int | None = None
    """What the trainer last announced, or had at the checkpoint that it went back to; None when that is not known."""
    step: StepStart = field(default_factory=StepStart)
    """The step that began with what was last announced."""
    weights: AnnouncedWeights = field(default_factory=AnnouncedWeights)
    """What was last announced; a rewind leaves it as well."""
    tally: Tally = field(default_factory=Tally)
    """What its own processes count."""
    gateway_tally: Tally = field(default_factory=Tally)
    """What gateways count for it meanwhile."""
    samples: Counter[str] = field(default_factory=Counter)
    """Samples accepted, by what became of them; their bytes; rows delivered and cut."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rollouts by how they ended. Forks count as part of their rollout."""
    rewards: RewardTally = field(default_factory=RewardTally)
    """Rewards of the rollouts that are in a group."""
    process_ended_s: float | None = None
    """Active seconds at which the run process ended."""
    replay: dict[str, Any] | None = None
    """Of a run that replays another: ``source``, its run or file, ``recorded_at_s``, ``differences``."""
    is_fed: bool = False
    """Whether the server feeds it what was recorded: it has no process."""

    @property
    def payload(self) -> dict[str, Any]:
        """What was sent, without its list; the generator gets that again, and its own ``remote_buffer_url``."""
        return self.start.payload

    @property
    def base_skip(self) -> Sequence[InstanceId]:
        """Ids (with multiplicity) that the current process skips besides the groups that this run holds."""
        return self.start.base_skip

    @property
    def is_alive(self) -> bool:
        """Not failed, stopped or ended."""
        return not self.has_ended and self.state not in (RunState.FAILED, RunState.STOPPED)

    @property
    def counts_groups(self) -> bool:
        """Whether it is held once a step has its groups."""
        oversampling = self.settings.oversampling
        return oversampling is not None and oversampling.groups_per_step is not None

    @property
    def counts(self) -> Counter[str]:
        """Everything that is counted for it."""
        return self.tally.totals + self.gateway_tally.totals

    def document(self) -> dict[str, Any]:
        """Everything but its start and what a ``RunRow`` has columns for, as JSON values."""
        document: dict[str, Any] = _stored.dump_python(self, mode="json", by_alias=True, exclude=_STORED_APART)
        return document

    @classmethod
    def restore(cls, row: RunRow, start: StartRow | None) -> "Run":
        """A run as it was stored."""
        values = row.document | asdict(row) | {"start": RunStart.restore(start.document) if start else RunStart({})}
        # What it has made is delivered; a process could not be told what to make.
        if start is None and row.state in WORKING:
            values |= {"state": RunState.FAILED, "reason": LOST_START, "process_ended_s": 0.0}
        return _stored.validate_python(values)


_stored = TypeAdapter(Run)
_STORED_APART = {"run_id", "name", "task_type", "state", "created_at_s", "start"}


def check_name(name: str) -> str:
    """Return ``name`` if it can be a run's name (up to 64 of ``A-Z a-z 0-9 . _ -``); else raise ``InvalidInput``."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(f"a name has up to 64 of the characters A-Z a-z 0-9 . _ -, got {name!r}", field="name")
    return name
