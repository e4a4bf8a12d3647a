"""The input of the analysis, from any log: steps, their requests, and how each spent its time. All times in seconds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from forebay.telemetry.tracing.read_trace import BadLines

NS = 1e-9
"""A nanosecond, the unit of records, in seconds."""


@dataclass(slots=True)
class Event:
    """The smallest unit of work: a leaf of the tree of spans."""

    name: str
    """A phase: one of the records' ``PHASES``, a user's own, or an event of verl's log."""
    begin_s: float
    end_s: float
    turn: int | None = None
    """From 0."""
    is_open: bool = False
    """Whether it had not ended when the log ended; ``end_s`` is then the end of the log."""
    info: dict[str, Any] = field(default_factory=dict)
    """``engine``, ``load``, ``cpu_s``, ``finish_reason``, …"""


@dataclass(slots=True)
class TurnTimes:
    """One turn of a request."""

    number: int
    """From 0."""
    begin_s: float
    end_s: float
    phases: dict[str, float] = field(default_factory=dict)
    """Exclusive seconds by phase."""
    engine: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    finish_reason: str = ""
    has_tools: bool = False
    tools: tuple[str, ...] = ()
    """Names of the tools that it called, if known."""
    engine_s: float | None = None
    """The time of its calls as reported by the engine, which includes its queue."""


class FailedAttempt(NamedTuple):
    """An attempt that ended in an error."""

    kind: str
    """The outcome: ``engine_failure``, ``environment_failure``, …"""
    begin_s: float
    end_s: float
    tokens: int = 0
    tool: str = ""
    """The tool that raised, if one did."""


SURPLUS = ("aborted", "broken")
"""Endings of requests that yielded nothing without failing: not needed any more, or at their cap."""


@dataclass(slots=True)
class Request:
    """One rollout, with all its attempts."""

    request_id: str
    """The ``uid``."""
    worker: str
    """The engine of its first call, or the id of a worker in verl's log."""
    begin_s: float
    end_s: float
    group: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Exclusive seconds by phase, which add up to its duration."""
    turns: list[TurnTimes] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Its leaves, ordered by begin; empty if only the summary was kept.

    A span's time outside its children is a leaf, too. Events therefore cover the request, and events that are open
    at the same moment share that time.
    """
    ending: str = "finished"
    """``finished``, ``failed``, one of ``SURPLUS``, or ``open`` if it had not ended."""
    is_used: bool = True
    """Whether its sample was delivered in a batch."""
    discarded: str = ""
    """Why its group was discarded (``invalid``, ``timed_out``, …); "" if it was not."""
    is_capped: bool = False
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    num_attempts: int = 1
    num_broken: int = 0
    """Attempts before the last one that reached their cap: thrown away and run again."""
    broken_s: float = 0.0
    broken_tokens: int = 0
    failed: list[FailedAttempt] = field(default_factory=list)
    """Attempts that failed, including the last one."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(slots=True)
class Standstill:
    """A blocked event loop."""

    process: str
    begin_s: float
    end_s: float
    stack: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SharedEngine:
    """A time in which other runs used some of the run's engines."""

    begin_s: float
    end_s: float
    engines: list[str]
    runs: list[str]


@dataclass(slots=True)
class ReadTimes:
    """One read that delivered groups to a step."""

    asked_s: float
    satisfied_s: float
    """When the groups of the reply were ready."""
    sent_s: float
    by: str = ""
    """The group that it waited for last; "" if it did not wait."""
    groups: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ProfileStep:
    """A step, from the last byte of the previous step to its own, and what was generated for it."""

    name: str
    """The trainer's name for it: ``67``."""
    begin_s: float
    end_s: float
    """When its last byte was sent (verl's log: the end of the step)."""
    asked_s: float | None = None
    """When the trainer asked for it, and so stopped training; None if the log does not say."""
    satisfied_s: float | None = None
    """When the groups of the reply were ready; after that, the hooks ran and the reply was sent."""
    released_by: str = ""
    """The group that the read waited for last; "" if it did not wait."""
    requests: list[Request] = field(default_factory=list)
    worker_phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds outside requests: by worker, by phase (``barrier_wait``, ``preprocessing``, …).

    If these include more than ``barrier_wait``, the step's shares are computed from them (as in verl's log);
    otherwise from its requests' phases.
    """
    ready_s: dict[str, float] = field(default_factory=dict)
    """When each group became ready, by its id."""
    ready_by: dict[str, str] = field(default_factory=dict)
    """By group: the ``request_id`` whose sample made it ready."""
    delivery_phases: dict[str, float] = field(default_factory=dict)
    """``hooks``, ``delivery``: seconds spent on making the reply."""
    standstills: list[Standstill] = field(default_factory=list)
    shared: list[SharedEngine] = field(default_factory=list)
    idle_s: float | None = None
    """How long no request ran between its last group and its read; None if unknown."""
    length_cap: int | None = None
    """The largest number of tokens in a response, if known."""
    response_tokens: list[int] = field(default_factory=list)
    """Lengths of responses that the log reports per step, not per request."""
    reads: list[ReadTimes] = field(default_factory=list)
    """The reads that delivered its groups; empty if the log has none."""
    is_open: bool = False
    """Whether the step had not ended when the log ended."""
    num_unlisted: int = 0
    """Requests that the log counts but does not describe …"""
    num_unlisted_thrown: int = 0
    """… and how many of them were thrown away."""
    num_repeated: int = 0
    """Requests that ended more than once at one worker."""
    overlong: dict[str, float] = field(default_factory=dict)
    """Requests ("" for a worker) of which a part lasts longer than its time stamps allow: how many times as long."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


class Timeline(Protocol):
    """Yields one step at a time, so that only the current one is in memory."""

    source: str
    """The title's name for the source of the report."""
    problems: BadLines
    """Complete once all steps have been read."""
    notes: list[str]
    """Notes for the reader: dropped spans, missing totals."""

    def steps(self) -> Iterator[ProfileStep]:
        """Steps in chronological order. The caller drops each of them."""
        ...
