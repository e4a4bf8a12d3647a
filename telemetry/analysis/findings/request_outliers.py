"""Requests that took longer than their like, by rule and not by rank: most steps have none.

One is an outlier whose duration, time at its engine, that time against its tokens, reward, or time outside its engine
lies more than five robust standard deviations above the median of its step, in logarithms, and by more than a twentieth
of it.
"""

from collections.abc import Sequence
from typing import Any

from forebay.telemetry.analysis.findings.engine_rates import working_s
from forebay.telemetry.analysis.findings.request_causes import TypicalRequest
from forebay.telemetry.analysis.findings.wording import happened, subject
from forebay.telemetry.analysis.report import EventPath, Gap, OutlierRequest, StepSummary
from forebay.telemetry.analysis.robust import log_deviations, median
from forebay.telemetry.analysis.timeline import SURPLUS, Event, ProfileStep, Request, TurnTimes

MIN_DEVIATION = 5.0
MIN_SHARE = 0.05
"""Of the step."""
MAX_PER_STEP = 20
_MIN_REQUESTS = 4
"""Of fewer, none is usual."""
_MAX_EVENTS = 300
_ENGINE_SPREAD = 0.05
_OUTSIDE_SPREAD = 0.5
_OUTSIDE_SHARE = 0.01
"""Times at an engine, and outside it, scatter by as much before that means anything: most requests may call no tool,
and those that do are no outliers. Outside an engine a hundredth of the step is nothing."""


def per_step(step: ProfileStep, summary: StepSummary, gaps: Sequence[Gap] = ()) -> list[OutlierRequest]:
    """The worst ``MAX_PER_STEP``; what was thrown away is none, nor what was run again after its cap."""
    requests = [request for request in step.requests if request.ending not in SURPLUS and not request.num_broken]
    if len(requests) < _MIN_REQUESTS:
        return []
    typical = TypicalRequest(step, gaps)
    places = _outliers(requests, typical, summary.seconds)
    found = [_described(summary.name, requests[place], typical) for place in places]
    found.sort(key=lambda outlier: -outlier.cause_s)
    return [outlier for outlier in found if outlier.cause_s >= MIN_SHARE * summary.seconds][:MAX_PER_STEP]


def _outliers(requests: list[Request], typical: TypicalRequest, step_s: float) -> list[int]:
    least_s = MIN_SHARE * step_s
    expected = [sum(typical.rates.expected_s(request)) for request in requests]
    working = [working_s(request.phases) for request in requests]
    ratios = [took / needs if needs > 0 else 1.0 for took, needs in zip(working, expected, strict=True)]
    rewards = [request.phases.get("reward", 0.0) for request in requests]
    usual_reward_s = median(rewards)
    by_duration = log_deviations([request.duration_s for request in requests])
    usual_work_s = median(working)
    by_work = log_deviations([max(seconds, 0.001) for seconds in working], _ENGINE_SPREAD)
    by_engine = log_deviations(ratios, _ENGINE_SPREAD)
    outside = [request.duration_s - took for request, took in zip(requests, working, strict=True)]
    by_outside = log_deviations([max(seconds, _OUTSIDE_SHARE * step_s) for seconds in outside], _OUTSIDE_SPREAD)
    usual_outside_s = median(outside)
    by_reward = log_deviations([max(seconds, 0.001) for seconds in rewards])
    return [
        place
        for place, request in enumerate(requests)
        if (by_duration[place] > MIN_DEVIATION and request.duration_s - typical.duration_s > least_s)
        or (by_work[place] > MIN_DEVIATION and working[place] - usual_work_s > least_s)
        or (by_engine[place] > MIN_DEVIATION and working[place] - expected[place] > least_s)
        or (by_outside[place] > MIN_DEVIATION and outside[place] - usual_outside_s > least_s)
        or (by_reward[place] > MIN_DEVIATION and rewards[place] - usual_reward_s > least_s)
    ]


def _described(step: str, request: Request, typical: TypicalRequest) -> OutlierRequest:
    excess = typical.cause_of(request)
    path = EventPath(
        step=step,
        worker=_engine_of(request, excess.turn),
        group=request.group,
        request=request.request_id,
        turn=excess.turn,
        event=excess.phase,
    )
    what = happened(excess.cause, excess.seconds, excess.phase, request.sampled_tokens, typical.tokens)
    return OutlierRequest(
        step=step,
        request=request.request_id,
        worker=path.worker,
        group=request.group,
        begin_s=request.begin_s,
        seconds=request.duration_s,
        beyond_s=request.duration_s - typical.duration_s,
        cause=excess.cause,
        cause_s=excess.seconds,
        cause_event=excess.phase,
        sentence=f"{subject(path, len(request.turns))} {what}",
        turn=excess.turn,
        phases=request.phases,
        turns=[_turn(turn, request) for turn in request.turns],
        events=[_event(event, request) for event in _shown(request.events)],
    )


def _engine_of(request: Request, turn: int | None) -> str:
    """Of the turn that is to blame."""
    if turn is not None and turn < len(request.turns):
        return request.turns[turn].engine or request.worker
    return request.worker


def _shown(events: list[Event]) -> list[Event]:
    """The longest, in the order of time."""
    if len(events) <= _MAX_EVENTS:
        return events
    longest = sorted(events, key=lambda event: event.begin_s - event.end_s)[:_MAX_EVENTS]
    return sorted(longest, key=lambda event: event.begin_s)


def _turn(turn: TurnTimes, request: Request) -> dict[str, Any]:
    return {
        "number": turn.number,
        "begin_s": turn.begin_s - request.begin_s,
        "seconds": turn.end_s - turn.begin_s,
        "engine": turn.engine,
        "tokens": turn.sampled_tokens,
        "finish_reason": turn.finish_reason,
        "phases": turn.phases,
    }


def _event(event: Event, request: Request) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": event.name,
        "begin_s": event.begin_s - request.begin_s,
        "seconds": event.end_s - event.begin_s,
        "turn": event.turn,
    }
    if event.is_open:
        shown["is_open"] = True
    if "load" in event.info:
        shown["load"] = event.info["load"]
    return shown
