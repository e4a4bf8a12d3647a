"""What is analysed, whoever wrote it: steps, their requests, how each spent its time. All times in seconds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from forebay.telemetry.tracing.read_trace import BadLines

NS = 1e-9
"""A nanosecond, the unit of records, in seconds."""


@dataclass(slots=True)
class Event:
    """The smallest thing that lasted: a leaf of the tree of spans."""

    name: str
    """A phase: one of ``PHASES`` of the records, a user's own, or an event of verl's log."""
    begin_s: float
    end_s: float
    turn: int | None = None
    """From 0."""
    is_open: bool = False
    """It never ended, as far as the log goes; ``end_s`` is then the end of the log."""
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


SURPLUS = ("aborted", "broken")
"""How a request ended that brought nothing, and by nobody's fault: it was not needed, or had come to its cap."""


@dataclass(slots=True)
class Request:
    """One rollout, with all its attempts."""

    request_id: str
    """The ``uid``."""
    worker: str
    """The engine of its first call, or the id of a worker of verl's log."""
    begin_s: float
    end_s: float
    group: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Exclusive seconds by phase; they add up to its duration."""
    turns: list[TurnTimes] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Its leaves in the order of their begin; empty where only the summary was kept.

    What a span did outside its children is a leaf as well, so that events cover the request, and at each moment the
    open ones share it.
    """
    ending: str = "finished"
    """``finished``, ``failed``, one of ``SURPLUS``, or ``open`` for one that had not ended."""
    is_used: bool = True
    """Whether its sample went out in a batch."""
    discarded: str = ""
    """Why its group was given up (``invalid``, ``timed_out``, …); "" for one that was not."""
    is_capped: bool = False
    reward: float | None = None
    num_attempts: int = 1
    num_broken: int = 0
    """Attempts before the last one that came to their cap: thrown away, and run again."""
    broken_s: float = 0.0
    broken_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(slots=True)
class Standstill:
    """An event loop that stood still."""

    process: str
    begin_s: float
    end_s: float
    stack: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ReadTimes:
    """One read by which a step got groups."""

    asked_s: float
    satisfied_s: float
    """When the groups of the reply were there."""
    judged_s: float
    """When the hooks had answered."""
    sent_s: float
    by: str = ""
    """The group that it waited for last; "" if it waited for none."""
    groups: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ProfileStep:
    """From the last byte of the step before to its own; and what was generated for it."""

    name: str
    """As the trainer counts: ``67``."""
    begin_s: float
    end_s: float
    """When its last byte had gone out (verl's log: the end of the step)."""
    asked_s: float | None = None
    """When the trainer asked for it: until then it trained. None where the log does not say."""
    satisfied_s: float | None = None
    """When the groups of the reply were there; from then on it was judged and sent."""
    released_by: str = ""
    """The group that the read waited for last; "" where it waited for none."""
    requests: list[Request] = field(default_factory=list)
    worker_phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of what is no request's: by worker, by phase (``barrier_wait``, ``preprocessing``, …).

    Where they tell more than ``barrier_wait``, the step's shares are theirs (as in verl's log); else those of
    its requests' phases.
    """
    ready_s: dict[str, float] = field(default_factory=dict)
    """When each group became ready, by its id."""
    ready_by: dict[str, str] = field(default_factory=dict)
    """By group: the ``request_id`` whose sample made it ready."""
    delivery_phases: dict[str, float] = field(default_factory=dict)
    """``hooks``, ``delivery``: seconds of the reply's making."""
    standstills: list[Standstill] = field(default_factory=list)
    length_cap: int | None = None
    """The largest number of tokens that a response may have, if it is known."""
    response_tokens: list[int] = field(default_factory=list)
    """Lengths of responses that are told for the step alone, not for its requests."""
    reads: list[ReadTimes] = field(default_factory=list)
    """Each of those that brought its groups; empty where the log tells none."""
    is_open: bool = False
    """The step that had no end yet when the log ended."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


class Timeline(Protocol):
    """One step after the other: never more of them in memory than one looks at."""

    source: str
    """What the report is about, for its title."""
    problems: BadLines
    """Complete once all steps were read."""
    notes: list[str]
    """Sentences a reader must know: that spans were dropped, that totals are not told."""

    def steps(self) -> Iterator[ProfileStep]:
        """In the order of time. Each is the caller's to drop."""
        ...
