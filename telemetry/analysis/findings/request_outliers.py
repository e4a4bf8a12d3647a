"""Finds requests that took longer than comparable ones. A threshold decides, not a rank, so most steps have none.

There are five measures of a request: its duration, the time at its engine, that time relative to its tokens, the time
of its reward, and the time outside its engine. A request is an outlier if one measure's logarithm is more than five
robust standard deviations above the median of its step, and the excess is more than a twentieth of the step.
"""

from collections.abc import Sequence
from typing import Any

from forebay.telemetry.analysis.findings.engine_rates import working_s
from forebay.telemetry.analysis.findings.request_causes import TypicalRequest
from forebay.telemetry.analysis.findings.wording import happened, subject
from forebay.telemetry.analysis.report import EventPath, Gap, OutlierRequest, StepSummary
from forebay.telemetry.analysis.robust import log_deviations, longest, median
from forebay.telemetry.analysis.timeline import SURPLUS, Event, ProfileStep, Request, TurnTimes

MIN_DEVIATION = 5.0
MIN_SHARE = 0.05
"""Share of the step."""
MAX_PER_STEP = 20
_MIN_REQUESTS = 4
"""With fewer requests, none can be called usual."""
_MAX_EVENTS = 300
_ENGINE_SPREAD = 0.05
_OUTSIDE_SPREAD = 0.5
_OUTSIDE_SHARE = 0.01
"""The spread assumed at least for times at an engine and outside it. Most requests may call no tool, and those that
do are not outliers. Times outside an engine below a hundredth of the step are ignored."""


def per_step(step: ProfileStep, summary: StepSummary, gaps: Sequence[Gap] = ()) -> list[OutlierRequest]:
    """The worst ``MAX_PER_STEP`` outliers, without requests that were thrown away or run again at their cap."""
    requests = [request for request in step.requests if request.ending not in SURPLUS and not request.num_broken]
    if len(requests) < _MIN_REQUESTS:
        return []
    typical = TypicalRequest(step, gaps)
    places = _outliers(requests, typical, summary.seconds)
    found = [_described(summary.name, requests[place], typical) for place in places]
    found.sort(key=lambda outlier: -outlier.cause_s)
    return [outlier for outlier in found if outlier.cause_s >= MIN_SHARE * summary.seconds][:MAX_PER_STEP]


def _outliers(requests: list[Request], typical: TypicalRequest, step_s: float) -> list[int]:
    """Indices of requests with one of five measures far above the usual, and by a relevant share of the step."""
    durations = [request.duration_s for request in requests]
    working = [working_s(request.phases) for request in requests]
    expected = [sum(typical.rates.expected_s(request)) for request in requests]
    ratios = [took / needs if needs > 0 else 1.0 for took, needs in zip(working, expected, strict=True)]
    outside = [lasted - took for lasted, took in zip(durations, working, strict=True)]
    rewards = [request.phases.get("reward", 0.0) for request in requests]
    measures = (
        (log_deviations(durations), _beyond(durations, typical.duration_s)),
        (log_deviations(_at_least(0.001, working), _ENGINE_SPREAD), _beyond(working)),
        (log_deviations(ratios, _ENGINE_SPREAD), [took - needs for took, needs in zip(working, expected, strict=True)]),
        (log_deviations(_at_least(_OUTSIDE_SHARE * step_s, outside), _OUTSIDE_SPREAD), _beyond(outside)),
        (log_deviations(_at_least(0.001, rewards)), _beyond(rewards)),
    )
    return [
        place
        for place in range(len(requests))
        if any(
            deviations[place] > MIN_DEVIATION and beyond[place] > MIN_SHARE * step_s for deviations, beyond in measures
        )
    ]


def _at_least(least: float, values: Sequence[float]) -> list[float]:
    return [max(value, least) for value in values]


def _beyond(seconds: Sequence[float], usual_s: float | None = None) -> list[float]:
    usual_s = median(seconds) if usual_s is None else usual_s
    return [each - usual_s for each in seconds]


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
        events=[
            _event(event, request)
            for event in longest(request.events, _MAX_EVENTS, lambda event: event.end_s - event.begin_s)
        ],
    )


def _engine_of(request: Request, turn: int | None) -> str:
    """The engine of the slow turn."""
    if turn is not None and turn < len(request.turns):
        return request.turns[turn].engine or request.worker
    return request.worker


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
