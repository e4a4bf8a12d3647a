"""How the requests of a step came to their ends: the share that has ended, over time; for all and by worker."""

from collections import defaultdict
from statistics import fmean, pstdev

from forebay.telemetry.analysis.report import CompletionCurve, StepSummary
from forebay.telemetry.analysis.robust import percentile, thinned
from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.numbers import percent_text

PERCENTILES = (50, 75, 80, 90, 95, 99, 99.9)
_POINTS_OF_ALL = 500
_POINTS_OF_WORKER = 100
_USUAL = 80.0
"""The share of requests that is always told, beside the one at the knee."""


def per_step(step: ProfileStep, summary: StepSummary) -> list[CompletionCurve]:
    """The curve of all requests that ended by themselves, then one of each worker."""
    begin_s = min((request.begin_s for request in step.requests), default=step.begin_s)
    ends: dict[str, list[float]] = defaultdict(list)
    for request in step.requests:
        if request.ending in ("finished", "failed"):
            ends[request.worker].append(request.end_s - begin_s)
    everything = sorted(end_s for own in ends.values() for end_s in own)
    if not everything:
        return []
    curves = [_curve(summary.name, "", everything, _POINTS_OF_ALL)]
    if len(ends) > 1:
        curves += [_curve(summary.name, worker, sorted(own), _POINTS_OF_WORKER) for worker, own in sorted(ends.items())]
    return curves


def _curve(step: str, worker: str, ends_s: list[float], most: int) -> CompletionCurve:
    knee = _knee(ends_s)
    return CompletionCurve(
        step=step,
        worker=worker,
        ends_s=thinned(ends_s, most),
        num_requests=len(ends_s),
        mean_s=fmean(ends_s),
        median_s=percentile(ends_s, 50),
        std_s=pstdev(ends_s),
        min_s=ends_s[0],
        max_s=ends_s[-1],
        percentiles={f"p{percent:g}": percentile(ends_s, percent) for percent in PERCENTILES},
        time_of_80=_time_share(ends_s, _USUAL),
        knee_requests=knee,
        knee_time=_time_share(ends_s, knee),
        sentence=_sentence(ends_s, knee),
    )


def _time_share(ends_s: list[float], percent: float) -> float:
    """In percent: after which part of the time ``percent`` of the requests have ended."""
    needed = max(1, -(-len(ends_s) * percent // 100))
    return 100 * ends_s[int(needed) - 1] / ends_s[-1] if ends_s[-1] > 0 else 0.0


def _knee(ends_s: list[float]) -> float:
    """The share of requests, in percent, at which the curve stands highest above its diagonal."""
    number = len(ends_s)
    last_s = ends_s[-1] or 1.0
    place = max(range(number), key=lambda place: (place + 1) / number - ends_s[place] / last_s)
    return 100 * (place + 1) / number


def _sentence(ends_s: list[float], knee: float) -> str:
    in_time = percent_text(_time_share(ends_s, _USUAL))
    usual = f"{percent_text(_USUAL)} of the requests end in the first {in_time} of the time"
    at_knee = _time_share(ends_s, knee)
    if abs(knee - _USUAL) < 1 or knee >= 100:
        return usual
    return f"{usual}; the curve bends at {percent_text(knee)} in {percent_text(at_knee)}"
