"""Defines trace files: a head, then one record per line, each a JSON object with its ``kind``.

Files are ``runs/RUN/trace/{run|gateway|server}-{start}-{pid}.{n}.jsonl``. Every ``t`` is a time in nanoseconds since
the Unix epoch. The head anchors the process's monotonic clock to wall time once, so setting the wall clock never
changes the order. Every ``d`` is a duration in nanoseconds. Records contain no prompts, replies, token ids or keys.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

if TYPE_CHECKING:  # it imports asyncio, which code that only opens spans does not need
    from forebay.telemetry.tracing.stall_watch import Stall

VERSION = 1

Process = Literal["run", "gateway", "server"]

Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""A time until the year 2116, or a duration. Any sum of both fits the formats to which traces are exported."""

PHASES = (
    "queue",  # for a slot among num_process
    "admission",  # for room in the buffer, which is full
    "hold",  # for the trainer's next weights, or paused engines
    "engine_wait",  # for an available engine
    "engine",  # a call in progress, split into the next three if the engine reports them
    "engine_queue",
    "prefill",
    "decode",
    "tool",
    "environment",  # a sandbox, or an agent's process before its first call and after its last
    "starting",  # before the first turn, if nothing else was measured
    "agent",  # between two turns, if nothing else was measured
    "reward_queue",  # for a reward worker
    "reward",
    "retry",  # the pause after a failed attempt
    "group",  # of a finished rollout, for the rest of its group
    "write",  # until the sample, or before it its group, is on the buffer's disk
)
"""The phases of a rollout. A user's ``span("parse")`` adds a phase of that name."""

SERVER_PHASES = ("buffer", "hooks", "delivery")
"""What a group waits for after its rollouts have ended: a read, the hooks, and the sending of the reply."""


class _Record(msgspec.Struct, tag_field="kind", kw_only=True, omit_defaults=True, gc=False):
    """Base of all records: tagged, without unknown values. No record can be part of a reference cycle."""


class _Timed(_Record):
    t: Nanoseconds


class Head(_Record, tag="head"):
    """The first line of each file."""

    version: int
    run_id: str
    process: Process
    start: int
    """The start of the run (``start-{n}``) to which the file belongs."""
    pid: int
    wall_ns: int
    mono_ns: int
    """Both clocks, read at the same moment."""
    number: int = 0
    """The ``n`` in the file's name. A stream of several files is split again at their heads."""
    boot: str = ""
    """Id of the machine's boot, if known. All processes of one boot share a monotonic clock."""


class RunPlan(_Timed, tag="plan"):
    """The plan of a run process, written once per pass over its rows, before the first rollout."""

    task_type: str = ""
    group_size: int = 0
    num_process: int | str = 0
    """Concurrent rollouts, or ``auto``."""
    num_epochs: int = 0
    max_tokens: int = 0
    """Tokens that one call may sample."""
    max_attempts: int = 0
    engines: list[str] = []
    """As configured, without logins. Engines behind a router are named in turns."""
    scheduler: dict[str, Any] = {}
    """Its settings; those of a custom policy are left out."""
    oversampling: dict[str, Any] = {}
    """Its settings; empty without over-sampling."""


class _SpanFields(_Timed):
    name: str
    """One of ``PHASES``, ``attempt``, ``turn``, or a name from user code."""
    id: str
    """16 hex digits, random per process."""
    up: str = ""
    """The enclosing span; "" for an attempt, and for spans outside rollouts."""
    uid: str = ""
    """The rollout's uid; "" outside rollouts."""
    group: str = ""
    attempt: int = 0
    turn: Annotated[int, msgspec.Meta(ge=0)] | None = None
    at: dict[str, Any] = {}
    """Attributes: ``engine``, ``sampled``, ``cached``, ``finish_reason``, ``total_s`` (of a call, as reported by its
    engine), ``cpu_s``, ``outcome``, and a user's own."""


class Span(_SpanFields, tag="span", kw_only=True):
    """Something with a duration: a phase, turn or attempt, or a span of user code."""

    d: Nanoseconds


class Open(_SpanFields, tag="open"):
    """A span still open after ten seconds, if an engine call with its ``load``. When it ends, a ``Span`` follows."""


class TurnSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn of an attempt."""

    t: Nanoseconds
    d: Nanoseconds
    """From its call to the next turn. The turns and the time before the first add up to the attempt."""
    engine: str = ""
    engine_ns: int = 0
    """Nanoseconds that its engine reports for its calls, the queue included; 0 unless reported for all of them."""
    prompt: int = 0
    cached: int = 0
    """Prompt tokens that were in the engine's cache."""
    sampled: int = 0
    finish_reason: str = ""
    has_tools: bool = False
    tools: list[str] = []
    """Names of the request's tools that the reply called, at most eight."""
    versions: list[str] = []
    phases: dict[str, Nanoseconds] = {}
    """Exclusive nanoseconds; they add up to ``d``."""


class RolloutSummary(_Timed, tag="rollout"):
    """One attempt of a rollout, from the request for its slot. Always written."""

    d: Nanoseconds
    """Until its end: the acknowledged write of its sample, or an ending without a sample."""
    id: str
    """Id of its ``attempt`` span."""
    uid: str
    group: str
    instance: str | int
    epoch: int = 0
    slot: int = 0
    """The slot of its sample in the group; without a sample, its number."""
    number: int = 0
    attempt: int = 0
    is_last: bool = True
    """False if the rollout was retried after this attempt."""
    step: int = 0
    """Number of weight versions announced before it began."""
    engine: str = ""
    """The engine of its first call."""
    ending: str = ""
    """``finished``, ``failed``, ``aborted`` (not needed any more), ``broken`` (at its cap), ``lost`` (with its
    worker) or ``retried``."""
    outcome: str = ""
    """The kind of failure (``engine_failure``, …)."""
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    """Named parts of the reward."""
    reward_cpu_s: float | None = None
    started: int = 0
    """When its rollout function was called."""
    worker: int | None = None
    """The worker on which it ran, if the run has workers."""
    prompt: int = 0
    cached: int = 0
    sampled: int = 0
    is_capped: bool = False
    """Whether a call ended at its token limit."""
    phases: dict[str, Nanoseconds] = {}
    """Exclusive nanoseconds; they add up to ``d``."""
    turns: list[TurnSummary] = []
    has_spans: bool = False
    """Whether its group is among those whose spans are kept."""

    @property
    def end(self) -> int:
        """The end time."""
        return self.t + self.d


class GroupChange(_Timed, tag="group"):
    """A group entered a state: ``open``, ``ready``, ``leased``, ``acked``, ``discarded``."""

    t: Nanoseconds
    """If ready: when its last sample arrived, when it timed out, or when a trainer no longer held it."""
    group: str
    state: str
    reason: str = ""
    batch: str = ""
    last: str = ""
    """The uid of the sample that made it ready."""
    judged: int = 0
    """If ready: when the hooks had decided that, which happens only on a read."""


class Read(_Timed, tag="read"):
    """One read by a trainer, from its request. Preceding polls without groups are included."""

    id: str
    last_asked: int = 0
    """Time of its last request, if it polled; 0 if it requested once."""
    satisfied: int = 0
    """When the groups of the reply were ready; 0 if they never were."""
    by: str = ""
    """The group that the read waited for last; "" if it did not wait."""
    judged: int = 0
    """When the hooks returned."""
    first_byte: int = 0
    disk: int = 0
    """How long, in ns, the last byte waited until the lease was on the buffer's disk."""
    sent: int = 0
    """When the last byte was sent; 0 if the client disconnected before."""
    batch: str = ""
    step: int | None = None
    """The step that the trainer gave for the batch."""
    weights: int | None = None
    """The last announced weight version."""
    num_polls: int = 1
    num_rows: int = 0
    num_bytes: int = 0
    groups: list[str] = []
    worst: str = ""
    """Why it delivered nothing, if so."""


class BatchChange(_Timed, tag="batch"):
    """A batch was acknowledged, released, expired or revoked, or was added to a checkpoint."""

    batch: str
    state: str
    checkpoint: int | None = None


class Weights(_Timed, tag="weights"):
    """The trainer announced weights, or the engines were paused or resumed."""

    what: Literal["announced", "paused", "resumed"]
    version: int | None = None


class SharedEngines(_Timed, tag="shared"):
    """Which engines other runs of the server use: when the run starts, and when that changes."""

    engines: list[str] = []
    """The engines that are shared from now on; empty if none is."""
    runs: list[str] = []
    """Ids of the other runs."""


class LoopStall(_Timed, tag="loop"):
    """A blocked event loop."""

    d: Nanoseconds
    stack: list[str] = []
    """``file:line function``, innermost last."""
    has_ended: bool = True

    @classmethod
    def of(cls, stall: "Stall", offset_ns: int) -> Self:
        """The record of a stall. ``offset_ns`` converts the monotonic clock to that of the trace."""
        began, until = (int(each_s * 1e9) + offset_ns for each_s in (stall.begun_s, stall.until_s))
        return cls(t=began, d=until - began, stack=stall.stack, has_ended=stall.has_ended)


class ProcessChange(_Timed, tag="process"):
    """A process of the run began or ended. A process without an end was killed."""

    what: Literal["started", "ended", "failed", "restarted"]
    process: str = ""
    """The process, if not the file's own: the server reports on run processes."""


class Dropped(_Timed, tag="dropped"):
    """Records that are missing: the queue or the disk was full, or the budget removed them."""

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
    | SharedEngines
    | LoopStall
    | ProcessChange
    | Dropped
    | Head
)
"""Any line of a trace file."""
