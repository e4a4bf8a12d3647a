"""What a trace file holds: a head, then one record a line, each a JSON object that names its ``kind``.

Files are ``runs/RUN/trace/{run|gateway|server}-{start}-{pid}.{n}.jsonl``. Every ``t`` is a moment in nanoseconds since
the Unix epoch: the head anchors the process's monotonic clock to the wall once, so that no step of the wall's clock
changes an order. Every ``d`` is a duration in nanoseconds. No prompt, reply, token id or key stands in a record.
"""

from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

if TYPE_CHECKING:  # it loads asyncio, which code that only opens spans does without
    from forebay.telemetry.tracing.stall_watch import Stall

VERSION = 1

Process = Literal["run", "gateway", "server"]

PHASES = (
    "queue",  # for a place among num_process
    "admission",  # for room in the buffer
    "hold",  # for the trainer's next weights, or engines that are paused
    "engine_wait",  # for an engine that answers
    "engine",  # a call under way; where the engine tells it, split into the next three
    "engine_queue",
    "prefill",
    "decode",
    "tool",
    "environment",  # a sandbox, or an agent's process before its first call and after its last
    "agent",  # between two turns, where nobody measured anything
    "reward_queue",  # for a worker that computes rewards
    "reward",
    "retry",  # the pause after a failed attempt
    "write",  # until the sample is on the buffer's disk
)
"""What the time of a rollout is spent on. A user's ``span("parse")`` adds a phase of that name."""

SERVER_PHASES = ("buffer", "hooks", "delivery")
"""What a group waits for once its rollouts have ended: to be asked for, to be judged, to be sent."""


class _Record(msgspec.Struct, tag_field="kind", kw_only=True, omit_defaults=True, gc=False):
    """What all have in common: they are tagged, and leave out what is not known. None can be part of a circle."""


class Head(_Record, tag="head"):
    """The first line of each file."""

    version: int
    run_id: str
    process: Process
    start: int
    """The run's start (``start-{n}``) that the file belongs to."""
    pid: int
    wall_ns: int
    mono_ns: int
    """Both clocks at one moment."""
    number: int = 0
    """The ``n`` of the file's name: a stream of several files is taken apart again by their heads."""
    boot: str = ""
    """Which machine, since when it is up, if that is known: within it all processes have one monotonic clock."""


class RunPlan(_Record, tag="plan"):
    """What a run process set out to do: once for each pass over its rows, before the first rollout."""

    t: int
    task_type: str = ""
    group_size: int = 0
    num_process: int | str = 0
    """Rollouts at once, or ``auto``."""
    num_epochs: int = 0
    max_tokens: int = 0
    """That one call may sample."""
    max_attempts: int = 0
    engines: list[str] = []
    """As they were given, without logins; behind a router are others, which the turns name."""
    scheduler: dict[str, Any] = {}
    """Its settings, but for those of somebody else's policy."""
    oversampling: dict[str, Any] = {}
    """Its settings; empty without."""


class Span(_Record, tag="span"):
    """Something that lasted: a phase, a turn, an attempt, or what a user's code named."""

    name: str
    """One of ``PHASES``, ``attempt``, ``turn``, or the name that a user's code gave."""
    t: int
    d: int
    id: str
    """16 hex digits, random per process."""
    up: str = ""
    """The span around it; "" for an attempt, and for what belongs to no rollout."""
    uid: str = ""
    """The rollout's; "" for what belongs to none."""
    group: str = ""
    attempt: int = 0
    turn: int | None = None
    """From 0."""
    at: dict[str, Any] = {}
    """More: ``engine``, ``sampled``, ``cached``, ``finish_reason``, ``cpu_s``, ``outcome``, and a user's own."""


class Open(_Record, tag="open"):
    """A span that has lasted ten seconds and goes on; once it ends, a ``Span`` with the same id follows."""

    name: str
    t: int
    id: str
    up: str = ""
    uid: str = ""
    group: str = ""
    attempt: int = 0
    turn: int | None = None
    at: dict[str, Any] = {}
    """As of a ``Span``; for an engine call also ``load``: what its engine says of itself."""


class TurnSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn of an attempt."""

    t: int
    d: int
    """From its call to the next turn, so that the turns and what lies before the first add up to the attempt."""
    engine: str = ""
    prompt: int = 0
    cached: int = 0
    """Tokens of the prompt that the engine had in its cache."""
    sampled: int = 0
    finish_reason: str = ""
    has_tools: bool = False
    versions: list[str] = []
    phases: dict[str, int] = {}
    """Exclusive nanoseconds; they add up to ``d``."""


class RolloutSummary(_Record, tag="rollout"):
    """One attempt of a rollout, from the moment at which a place for it was asked for. Always written."""

    t: int
    d: int
    """To its end: the acknowledged write of its sample, or whatever ended it without one."""
    id: str
    """Of its ``attempt`` span."""
    uid: str
    group: str
    instance: str | int
    epoch: int = 0
    slot: int = 0
    """The place in its group that its sample has; for one without a sample, its number."""
    number: int = 0
    attempt: int = 0
    is_last: bool = True
    """False for an attempt after which the rollout was tried again."""
    step: int = 0
    """How many weight versions had been announced when it began."""
    engine: str = ""
    """Of its first call."""
    ending: str = ""
    """``finished``, ``failed``, ``aborted`` (nobody needed it any more), ``broken`` (at its cap), ``lost`` (with its
    worker) or ``retried``."""
    outcome: str = ""
    """Of a failure: its kind (``engine_failure``, …)."""
    reward: float | None = None
    reward_cpu_s: float | None = None
    started: int = 0
    """When its rollout function was called."""
    worker: int | None = None
    """Where it ran, if the run has workers."""
    prompt: int = 0
    cached: int = 0
    sampled: int = 0
    is_capped: bool = False
    """Whether a call ended at its token limit."""
    phases: dict[str, int] = {}
    """Exclusive nanoseconds; they add up to ``d``."""
    turns: list[TurnSummary] = []
    has_spans: bool = False
    """Whether its group is in the share whose spans are kept."""

    @property
    def end(self) -> int:
        """When it ended."""
        return self.t + self.d


class GroupChange(_Record, tag="group"):
    """A group entered a state: ``open``, ``ready``, ``leased``, ``acked``, ``discarded``."""

    t: int
    """Of one that is ready: when the last of its samples came, or its time was up, or it came back from a trainer."""
    group: str
    state: str
    reason: str = ""
    batch: str = ""
    last: str = ""
    """The uid of the sample that made it ready."""
    judged: int = 0
    """Of one that is ready: when the hooks had said so, which they are asked once somebody reads."""


class Read(_Record, tag="read"):
    """One read by a trainer, from the moment at which it asked. Polls without groups before it are part of it."""

    t: int
    id: str
    last_asked: int = 0
    """When it asked for the last time, if it polled; 0 if it asked once."""
    satisfied: int = 0
    """When the groups of the reply were there; 0 if none ever were."""
    by: str = ""
    """The group that the read waited for last; "" if none had to be waited for."""
    judged: int = 0
    """When the hooks had answered."""
    first_byte: int = 0
    sent: int = 0
    """When the last byte had gone out; 0 if the client went away before."""
    batch: str = ""
    step: int | None = None
    """What the trainer said that the batch is for."""
    weights: int | None = None
    """The weight version announced last."""
    num_polls: int = 1
    num_rows: int = 0
    num_bytes: int = 0
    groups: list[str] = []
    worst: str = ""
    """Why it brought nothing, where it did not."""


class BatchChange(_Record, tag="batch"):
    """A batch was acknowledged, released, expired or revoked, or a checkpoint holds it."""

    t: int
    batch: str
    state: str
    checkpoint: int | None = None


class Weights(_Record, tag="weights"):
    """The trainer announced weights, or the engines were paused or resumed."""

    t: int
    what: Literal["announced", "paused", "resumed"]
    version: int | None = None


class LoopStall(_Record, tag="loop"):
    """An event loop stood still."""

    t: int
    d: int
    stack: list[str] = []
    """``file:line function``, innermost last."""
    has_ended: bool = True

    @classmethod
    def of(cls, stall: "Stall", offset_ns: int) -> Self:
        """Its record; ``offset_ns``: from the monotonic clock to that of the trace."""
        began, until = (int(each_s * 1e9) + offset_ns for each_s in (stall.begun_s, stall.until_s))
        return cls(t=began, d=until - began, stack=stall.stack, has_ended=stall.has_ended)


class ProcessChange(_Record, tag="process"):
    """A process of the run began or ended; one without an end was killed."""

    t: int
    what: Literal["started", "ended", "failed", "restarted"]
    process: str = ""
    """Which one, if it is not the file's own: the server tells of run processes."""


class Dropped(_Record, tag="dropped"):
    """Records that are not there: the queue was full, the disk was, or the budget took them."""

    t: int
    spans: int = 0
    summaries: int = 0
    why: str = ""


Record = (
    Span
    | Open
    | RunPlan
    | RolloutSummary
    | GroupChange
    | Read
    | BatchChange
    | Weights
    | LoopStall
    | ProcessChange
    | Dropped
    | Head
)
"""Any line."""
