"""When the requests of a step ended: the share that has ended over time, and stretches in which none ended.

In a gap, other requests should have ended: the worker was stalled or slow.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, pstdev

from forebay.telemetry.analysis.report import CompletionCurve, Gap, StepSummary
from forebay.telemetry.analysis.robust import percentile, thinned
from forebay.telemetry.analysis.timeline import ProfileStep

_PERCENTILES = (50, 75, 80, 90, 95, 99, 99.9)
_POINTS_OF_ALL = 500
_POINTS_OF_WORKER = 100
_USUAL = 80.0
"""The share of requests that is reported in addition to the one at the knee."""

_MIN_GAP_SHARE = 0.05
"""Share of the step. A shorter gap costs too little to be mentioned."""
_MIN_EXPECTED = 12.0
"""How many requests should have ended in the gap, at the slower of both rates. By chance, a gap like this is empty once
in 160,000 times (e**-12)."""
_MIN_AROUND = 8
"""Requests required on either side to compute a rate."""
_RATE_OVER = 100
"""The rate next to a gap is computed over this many requests."""
_SAME_RATE = 0.25


def completion_of(step: ProfileStep, summary: StepSummary) -> tuple[list[CompletionCurve], list[Gap]]:
    """The curve of all requests that ended by themselves, then one for each worker; the gaps of each worker."""
    begin_s = min((request.begin_s for request in step.requests), default=step.begin_s)
    ends: dict[str, list[float]] = defaultdict(list)
    for request in sorted(step.requests, key=lambda request: (request.worker, request.end_s)):
        if request.ending in ("finished", "failed"):
            ends[request.worker].append(request.end_s - begin_s)
    curves = []
    if ends:
        everything = sorted(end_s for own in ends.values() for end_s in own)
        curves.append(_curve(summary.name, "", everything, _POINTS_OF_ALL))
    if len(ends) > 1:
        curves += [_curve(summary.name, worker, own, _POINTS_OF_WORKER) for worker, own in ends.items()]
    least_s = _MIN_GAP_SHARE * summary.seconds
    return curves, [gap for worker, own in ends.items() for gap in _gaps(summary.name, worker, own, least_s)]


def _curve(step: str, worker: str, ends_s: list[float], most: int) -> CompletionCurve:
    knee = _knee(ends_s)
    return CompletionCurve(
        step=step,
        worker=worker,
        ends_s=thinned(ends_s, most),
        num_requests=len(ends_s),
        mean_s=fmean(ends_s),
        std_s=pstdev(ends_s),
        percentiles={f"p{percent:g}": percentile(ends_s, percent) for percent in _PERCENTILES},
        time_of_80=_time_share(ends_s, _USUAL),
        knee_requests=knee,
        knee_time=_time_share(ends_s, knee),
    )


def _time_share(ends_s: list[float], percent: float) -> float:
    """The share of the time, in percent, after which ``percent`` of the requests have ended."""
    needed = max(1, -(-len(ends_s) * percent // 100))
    return 100 * ends_s[int(needed) - 1] / ends_s[-1] if ends_s[-1] > 0 else 0.0


def _knee(ends_s: list[float]) -> float:
    """The share of requests, in percent, at which the curve is highest above its diagonal."""
    number = len(ends_s)
    last_s = ends_s[-1] or 1.0
    place = max(range(number), key=lambda place: (place + 1) / number - ends_s[place] / last_s)
    return 100 * (place + 1) / number


def _gaps(step: str, worker: str, ends_s: list[float], least_s: float) -> Iterator[Gap]:
    for place in range(_MIN_AROUND, len(ends_s) - _MIN_AROUND + 1):
        begin_s, end_s = ends_s[place - 1], ends_s[place]
        if end_s - begin_s < least_s or end_s <= begin_s:
            continue
        before = _rate(ends_s[max(0, place - _RATE_OVER) : place])
        after = _rate(ends_s[place : place + _RATE_OVER])
        if (end_s - begin_s) * min(before, after) >= _MIN_EXPECTED:
            yield Gap(
                step=step,
                worker=worker,
                begin_s=begin_s,
                end_s=end_s,
                num_before=place,
                num_after=len(ends_s) - place,
                rate_before=before,
                rate_after=after,
                is_standstill=abs(before - after) <= _SAME_RATE * max(before, after),
            )


def _rate(ends_s: list[float]) -> float:
    """Ends per second."""
    seconds = ends_s[-1] - ends_s[0]
    return (len(ends_s) - 1) / seconds if seconds > 0 else float(len(ends_s))
