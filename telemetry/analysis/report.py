"""The report as data, from which every page, table and picture is made. All times in seconds.

It has the numbers of every picture. Fields are added, never renamed, so that old and new reports can be
compared.
"""

from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 2


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
    """One of the causes in ``causes/wording.py``: ``slow_engine``, ``long_answer``, ``tool``, …"""
    seconds: float
    share: float
    """Share of the duration of ``share_of``."""
    share_of: Literal["step", "run"] = "step"
    """The step in ``path``, or all steps."""
    sentence: str
    """What happened, where and how long, and the remedy if one is known."""
    path: EventPath = msgspec.field(default_factory=EventPath)


class PathPart(msgspec.Struct, kw_only=True):
    """A stretch of a step's critical path; the parts add up to the wait."""

    begin_s: float
    seconds: float
    path: EventPath


class StepSummary(msgspec.Struct, kw_only=True):
    """Figures of one step."""

    name: str
    begin_s: float
    seconds: float
    train_s: float | None = None
    """Seconds from the step's begin until the trainer asks for data; None if the log does not say."""
    wait_s: float | None = None
    send_s: float | None = None
    is_outlier: bool = False
    is_open: bool = False
    """Whether the step had not ended when the log ended."""
    num_requests: int = 0
    num_used: int = 0
    outside_s: dict[str, float] = {}
    """Seconds outside requests, by phase: ``train``, ``hooks``, ``delivery``, and those in ``worker_s``."""
    worker_s: dict[str, float] = {}
    """Phases of workers (``preprocessing``, …): seconds of the slowest worker."""
    s_per_token: float | None = None
    """Mean seconds of an engine's work per sampled token."""
    critical_path: list[PathPart] = []
    beyond_next_s: float | None = None
    """How much later the last group was ready than the one before it."""
    barrier_s: dict[str, float] = {}
    """Seconds that each worker waited after ending all its requests."""
    requests_by_worker: dict[str, int] = {}
    phase_shares: dict[str, float] = {}
    """Percent of exclusive time; 100 in all."""
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
    """Mean reward of the slowest 20 %."""
    reward_of_rest: float | None = None
    reward_parts: dict[str, float] = {}
    """Mean of each named part of the rewards."""
    thrown_requests: int = 0
    thrown_s: float = 0.0
    thrown_tokens: int = 0
    broken_attempts: int = 0
    """Attempts that reached their cap and were run again, of requests that were not thrown away."""
    broken_s: float = 0.0
    broken_tokens: int = 0
    discarded_requests: dict[str, int] = {}
    """Requests of groups that were judged or timed out, and then discarded: by reason. Not included in ``thrown``."""
    discarded_s: float = 0.0
    discarded_tokens: int = 0
    requests_by_turns: dict[int, int] = {}
    mean_seconds_by_turns: dict[int, float] = {}
    engine_seconds_by_turn: dict[int, float] = {}
    """Mean engine seconds of turn n (from 0)."""
    group_skew: float | None = None
    """Mean over groups of last end minus first end."""


class CompletionCurve(msgspec.Struct, kw_only=True):
    """How many requests of a step, or of one worker in it, had ended over time."""

    step: str
    worker: str = ""
    """"" for all workers."""
    ends_s: list[float]
    """Seconds since the step's first start, ascending; of many, at most 500, with the first and the last."""
    num_requests: int = 0
    mean_s: float = 0.0
    std_s: float = 0.0
    percentiles: dict[str, float] = {}
    """``p50`` to ``p99.9``: seconds."""
    time_of_80: float = 0.0
    """The share of the time, in percent, in which 80 % of the requests end."""
    knee_requests: float = 0.0
    """The share of requests, in percent, at which the curve bends …"""
    knee_time: float = 0.0
    """… and the share of the time in which they end."""


class Gap(msgspec.Struct, kw_only=True):
    """A stretch in which no request ended."""

    step: str
    worker: str
    begin_s: float
    """Seconds since the step's first start."""
    end_s: float
    num_before: int
    num_after: int
    rate_before: float
    rate_after: float
    """Requests per second."""
    is_standstill: bool
    """Whether both rates agree within a quarter: then the worker was stalled, otherwise slow."""


class OutlierRequest(msgspec.Struct, kw_only=True):
    """A request that a step waited for last, and its largest cause."""

    step: str
    request: str
    worker: str
    group: str = ""
    begin_s: float
    seconds: float
    beyond_s: float
    """Seconds beyond the median."""
    cause: str
    cause_s: float = 0.0
    """Seconds due to the cause."""
    cause_event: str = ""
    """The phase in which these seconds were spent."""
    sentence: str
    turn: int | None = None
    phases: dict[str, float] = {}
    turns: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    """Its timeline: ``{name, begin_s, seconds, turn}``."""


class EngineFigures(msgspec.Struct, kw_only=True):
    """How fast one engine was over all steps. Values that it did not report are None."""

    engine: str
    num_requests: int = 0
    num_calls: int = 0
    s_per_token: float | None = None
    """Median seconds per sampled token of a call."""
    prefill_s: float | None = None
    """Median seconds per call, as the next two."""
    queue_s: float | None = None
    network_s: float | None = None
    """The part of a call outside the engine."""
    cached_share: float | None = None
    """Share of prompt tokens found in its cache."""


class Lane(msgspec.Struct, kw_only=True):
    """One request of a step, as a row of the picture of the step."""

    request: str
    worker: str
    is_last: bool = False
    """Whether the step waited for it last."""
    pieces: list[tuple[str, float, float]] = []
    """Phase, begin and seconds; the begin is relative to that of the step."""


class StepLanes(msgspec.Struct, kw_only=True):
    """Requests of a step over time."""

    step: str
    num_requests: int
    """All of them; ``lanes`` may be fewer."""
    lanes: list[Lane] = []
    in_flight: list[tuple[float, int]] = []
    """From each moment on, relative to the step's begin: the number of requests that were running."""


class WhatIf(msgspec.Struct, kw_only=True):
    """What a lower cap, or waiting for fewer requests, would save."""

    what: str
    """``cap`` or ``wait_for``."""
    value: float
    """Tokens, or the share of requests to wait for."""
    saved_s: float
    """Mean seconds per step."""
    num_cut: int
    """Answers that would be cut, or requests thrown away, in total."""
    reward_lost: float | None = None
    """Sum of their rewards, if known."""


class ProfileReport(msgspec.Struct, kw_only=True):
    """The whole report. Fields that the log does not contain are empty."""

    schema: int = SCHEMA_VERSION
    source: str
    num_steps: int = 0
    num_requests: int = 0
    total_s: float = 0.0
    findings: list[Finding] = []
    notes: list[str] = []
    problems: list[str] = []
    """``file:line: what`` for lines that were skipped."""
    num_problems: int = 0
    phase_shares: dict[str, float] = {}
    """Mean over steps, in percent; 100 in all."""
    phase_shares_by_time: dict[str, float] = {}
    """Weighted by the time of each step."""
    steps: list[StepSummary] = []
    curves: list[CompletionCurve] = []
    gaps: list[Gap] = []
    outliers: list[OutlierRequest] = []
    engines: list[EngineFigures] = []
    lanes: list[StepLanes] = []
    """The costliest steps."""
    whatifs: list[WhatIf] = []
    sentences: list[str] = []
    """Facts about all steps: "the cap is reached in 80 of 80 steps"."""


class StepFigures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures by which steps, or the means of runs, are compared."""

    seconds: float | None = None
    interval_s: float | None = None
    """Seconds from the begin of a step to that of the next; only for a run."""
    wait_s: float | None = None
    tokens_per_s: float | None = None
    length_min: float | None = None
    length_mean: float | None = None
    length_max: float | None = None
    share_at_cap: float | None = None
    reward_mean: float | None = None


class ComparedRun(msgspec.Struct, kw_only=True):
    """One of several runs, and how it differs from the first."""

    name: str
    source: str
    num_steps: int
    figures: StepFigures
    """Means over its steps."""
    reward_first: float | None = None
    reward_last: float | None = None
    outlier_steps: list[str] = []
    """Steps that took far longer than the others."""
    saved_s: float | None = None
    """Seconds saved per step, compared with the first run."""
    speedup: float | None = None
    throughput_gain: float | None = None
    """Tokens per second, divided by those of the first run."""
    reward_gain: float | None = None
    """Reward of its last step, minus that of the first run."""


class ComparedStep(msgspec.Struct, kw_only=True):
    """The steps of one name in all runs; None for runs without it."""

    name: str
    runs: list[StepFigures | None]


class ReportComparison(msgspec.Struct, kw_only=True):
    """A comparison of several runs."""

    runs: list[ComparedRun]
    steps: list[ComparedStep]
    sentences: list[str] = []
