"""Stretches in which no request of a worker ended, although others should have: whether it stood still or was slow."""

from collections import defaultdict
from dataclasses import dataclass

from forebay.telemetry.analysis.report import Gap, StepSummary
from forebay.telemetry.analysis.timeline import ProfileStep

MIN_SHARE = 0.05
"""Of the step. A shorter gap costs nothing worth a sentence."""
_MIN_EXPECTED = 12.0
"""How many requests should have ended in the gap, at the slower of both rates: by chance it is then empty once in
160,000 times (e**-12)."""
_MIN_AROUND = 8
"""Requests on either side, without which there is no rate."""
_RATE_OVER = 100
"""The rate beside a gap is that of so many requests."""
_SAME_RATE = 0.25


@dataclass(slots=True)
class _Side:
    num: int
    rate: float


def per_step(step: ProfileStep, summary: StepSummary) -> list[Gap]:
    """The longest first."""
    begin_s = min((request.begin_s for request in step.requests), default=step.begin_s)
    ends: dict[str, list[float]] = defaultdict(list)
    for request in step.requests:
        if request.ending in ("finished", "failed"):
            ends[request.worker].append(request.end_s - begin_s)
    found = [
        gap
        for worker, own in sorted(ends.items())
        for gap in _gaps(summary.name, worker, sorted(own), MIN_SHARE * summary.seconds)
    ]
    return sorted(found, key=lambda gap: gap.begin_s - gap.end_s)


def _gaps(step: str, worker: str, ends_s: list[float], least_s: float) -> list[Gap]:
    found = []
    for place in range(_MIN_AROUND, len(ends_s) - _MIN_AROUND + 1):
        left_s, right_s = ends_s[place - 1], ends_s[place]
        if right_s - left_s < least_s or right_s <= left_s:
            continue
        before, after = _before(ends_s, place), _after(ends_s, place)
        if (right_s - left_s) * min(before.rate, after.rate) >= _MIN_EXPECTED:
            found.append(_gap(step, worker, (left_s, right_s), before, after))
    return found


def _before(ends_s: list[float], place: int) -> _Side:
    first = max(0, place - _RATE_OVER)
    return _Side(place, _rate(place - first, ends_s[place - 1] - ends_s[first]))


def _after(ends_s: list[float], place: int) -> _Side:
    last = min(len(ends_s), place + _RATE_OVER) - 1
    return _Side(len(ends_s) - place, _rate(last - place + 1, ends_s[last] - ends_s[place]))


def _rate(number: int, seconds: float) -> float:
    """``number`` ends have one interval less between them."""
    return (number - 1) / seconds if seconds > 0 else float(number)


def _gap(step: str, worker: str, bounds: tuple[float, float], before: _Side, after: _Side) -> Gap:
    return Gap(
        step=step,
        worker=worker,
        begin_s=bounds[0],
        end_s=bounds[1],
        num_before=before.num,
        num_after=after.num,
        rate_before=before.rate,
        rate_after=after.rate,
        is_standstill=abs(before.rate - after.rate) <= _SAME_RATE * max(before.rate, after.rate),
    )
