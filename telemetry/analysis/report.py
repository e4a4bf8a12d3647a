"""The report as data: what every page, table and picture of it is made from. All times in seconds.

``as_json`` has the numbers of every picture. Fields are added, never renamed: a report of today is compared with one of
a year ago.
"""

from typing import Any

import msgspec

SCHEMA_VERSION = 1


class EventPath(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where something happened, from the step down to the event."""

    step: str = ""
    worker: str = ""
    group: str = ""
    request: str = ""
    turn: int | None = None
    event: str = ""


class Finding(msgspec.Struct, kw_only=True):
    """One cause of lost time; findings are ranked by the seconds lost."""

    cause: str
    """``long_answer``, ``slow_rate``, ``stalled_engine``, ``queue``, ``engine_away``, ``tool``, ``reward``,
    ``reward_queue``, ``blocked_loop``, ``agent``, ``late_trainer``, ``barrier``, ``gap``, ``constant_phase``, …"""
    seconds: float
    share: float
    """Of the duration of the step, or of all steps."""
    sentence: str
    """Names what, where and how long; ends with what to do, where that is known."""
    path: EventPath = msgspec.field(default_factory=EventPath)


class PathPart(msgspec.Struct, kw_only=True):
    """A stretch of a step's critical path; the parts add up to the wait."""

    begin_s: float
    seconds: float
    path: EventPath


class StepSummary(msgspec.Struct, kw_only=True):
    """One step."""

    name: str
    begin_s: float
    seconds: float
    train_s: float | None = None
    """From its begin until the read is asked; None where the log does not say."""
    wait_s: float | None = None
    send_s: float | None = None
    is_outlier: bool = False
    is_open: bool = False
    """It had no end yet when the log ended."""
    num_requests: int = 0
    num_used: int = 0
    critical_path: list[PathPart] = []
    beyond_next_s: float | None = None
    """What the last group cost beyond the one before it."""
    barrier_s: dict[str, float] = {}
    """By worker: how long it stood, having ended all of its requests."""
    requests_by_worker: dict[str, int] = {}
    phase_shares: dict[str, float] = {}
    """In percent, of exclusive time; 100 in all."""
    phase_seconds: dict[str, float] = {}
    length_min: float | None = None
    length_mean: float | None = None
    length_median: float | None = None
    length_p95: float | None = None
    length_max: float | None = None
    share_at_cap: float | None = None
    tokens_per_s: float | None = None
    cache_hit_rate: float | None = None
    reward_mean: float | None = None
    reward_of_slowest: float | None = None
    """Mean of the slowest 20 %."""
    reward_of_rest: float | None = None
    thrown_requests: int = 0
    thrown_s: float = 0.0
    thrown_tokens: int = 0
    broken_attempts: int = 0
    """Of requests that were not thrown away: they came to their cap, and were run again."""
    broken_s: float = 0.0
    broken_tokens: int = 0
    discarded_requests: dict[str, int] = {}
    """Those of groups that were judged, or timed out, and given up: by the reason. They are not among those thrown."""
    discarded_s: float = 0.0
    discarded_tokens: int = 0
    requests_by_turns: dict[int, int] = {}
    mean_seconds_by_turns: dict[int, float] = {}
    engine_seconds_by_turn: dict[int, float] = {}
    """Mean engine seconds of turn n (from 0)."""
    group_skew: float | None = None
    """Mean over groups of last end minus first end."""


class CompletionCurve(msgspec.Struct, kw_only=True):
    """How the requests of one step, or of one worker in it, came to their ends."""

    step: str
    worker: str = ""
    """"" for all workers."""
    ends_s: list[float] = []
    """Since the step's first start, ascending; thinned to at most 2 000."""
    num_requests: int = 0
    mean_s: float = 0.0
    median_s: float = 0.0
    std_s: float = 0.0
    min_s: float = 0.0
    max_s: float = 0.0
    percentiles: dict[str, float] = {}
    """``p50`` to ``p99.9``: seconds."""
    time_of_80: float = 0.0
    """The share of the time, in percent, in which 80 % of the requests end."""
    knee_requests: float = 0.0
    """The share of requests, in percent, at which the curve bends …"""
    knee_time: float = 0.0
    """… and the share of the time in which they end."""
    sentence: str = ""
    """"80 % of the requests end in the first 40 % of the time"."""


class Gap(msgspec.Struct, kw_only=True):
    """A stretch in which nothing ended."""

    step: str
    worker: str
    begin_s: float
    """Since the step's first start."""
    end_s: float
    num_before: int
    num_after: int
    rate_before: float
    rate_after: float
    """Requests per second."""
    is_standstill: bool
    """Whether both rates agree within a quarter: then the worker stood still; else it was slow."""


class OutlierRequest(msgspec.Struct, kw_only=True):
    """A request that took longer than its like, with its one cause."""

    step: str
    request: str
    worker: str
    group: str = ""
    begin_s: float
    seconds: float
    beyond_s: float
    """What it took beyond the median."""
    cause: str
    cause_s: float = 0.0
    """How much of that is the cause's."""
    cause_event: str = ""
    """The phase in which it was spent."""
    sentence: str
    turn: int | None = None
    phases: dict[str, float] = {}
    turns: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    """Its timeline: ``{name, begin_s, seconds, turn}``."""


class ConstantPhase(msgspec.Struct, kw_only=True):
    """A phase whose seconds do not depend on how much was generated."""

    name: str
    mean_s: float
    cv: float
    sentence: str


class WhatIf(msgspec.Struct, kw_only=True):
    """What would be saved by a lower cap, or by waiting for fewer."""

    what: str
    """``cap`` or ``wait_for``."""
    value: float
    """Tokens, or the share of requests waited for."""
    saved_s: float
    """Mean seconds per step."""
    num_cut: int
    """Answers that would be cut, or requests thrown away, in all."""
    reward_lost: float | None = None
    """Sum of the rewards of those, where they are known."""


class ProfileReport(msgspec.Struct, kw_only=True):
    """Everything. What a log does not tell is empty."""

    schema: int = SCHEMA_VERSION
    source: str
    num_steps: int = 0
    num_requests: int = 0
    total_s: float = 0.0
    findings: list[Finding] = []
    notes: list[str] = []
    problems: list[str] = []
    """``file:line: what`` of lines that were left out."""
    num_problems: int = 0
    phase_shares: dict[str, float] = {}
    """Mean over steps, in percent; 100 in all."""
    phase_shares_by_time: dict[str, float] = {}
    """Weighted by the time of each step."""
    constant_phases: list[ConstantPhase] = []
    steps: list[StepSummary] = []
    curves: list[CompletionCurve] = []
    gaps: list[Gap] = []
    outliers: list[OutlierRequest] = []
    whatifs: list[WhatIf] = []
    sentences: list[str] = []
    """What is true of all steps: "the cap is reached in 80 of 80 steps"."""

    def as_json(self) -> bytes:
        """The report, with the data of every picture."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


class StepFigures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step, or the mean of a run's steps, is compared by."""

    seconds: float | None = None
    interval_s: float | None = None
    """From the begin of a step to that of the next; of a run only."""
    wait_s: float | None = None
    tokens_per_s: float | None = None
    length_min: float | None = None
    length_mean: float | None = None
    length_max: float | None = None
    share_at_cap: float | None = None
    reward_mean: float | None = None


class ComparedRun(msgspec.Struct, kw_only=True):
    """One of several runs, and how it differs from the first of them."""

    name: str
    source: str
    num_steps: int
    figures: StepFigures
    """Means over its steps."""
    reward_first: float | None = None
    reward_last: float | None = None
    outlier_steps: list[str] = []
    """Steps that took far longer than its others."""
    saved_s: float | None = None
    """Seconds a step, against the first run."""
    speedup: float | None = None
    throughput_gain: float | None = None
    """Its tokens per second, by those of the first run."""
    reward_gain: float | None = None
    """Its last step's reward, less that of the first run."""


class ComparedStep(msgspec.Struct, kw_only=True):
    """The step of one name in all runs; None in those that have none."""

    name: str
    runs: list[StepFigures | None]


class ReportComparison(msgspec.Struct, kw_only=True):
    """Several runs, side by side."""

    runs: list[ComparedRun]
    steps: list[ComparedStep]
    sentences: list[str] = []

    def as_json(self) -> bytes:
        """All of it, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)
