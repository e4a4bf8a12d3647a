"""Statistics that are robust against outliers. Plain Python, so that a report does not need numpy."""

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
MAD_TO_SIGMA = 1.4826
"""Scales a median absolute deviation to a standard deviation, for normally distributed values."""
MIN_LOG_SPREAD = 0.02
"""Minimal spread. Without it, a difference of a tenth of a per cent would be an outlier among equal values."""
_MIN_THIRD = 3
"""With fewer points in a third, one outlier moves their median."""
_APART = 1.25
"""If x differs by less than this factor, noise dominates the slope between the outer thirds."""
_BISECTIONS = 60
"""Enough for all digits of a number."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of ascending values, with linear interpolation; 0.0 without values."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The median; 0.0 without values."""
    return statistics.median(values) if values else 0.0


def log_deviations(values: Sequence[float], least_spread: float = MIN_LOG_SPREAD) -> list[float]:
    """Robust standard deviations by which each value's logarithm is above (negative: below) the median.

    Iglewicz and Hoaglin, "How to Detect and Handle Outliers", with logarithms, because durations are skewed.
    """
    logs = [math.log(max(value, 1e-9)) for value in values]
    center, spread = _center_and_spread(logs)
    return [(value - center) / max(spread, least_spread) for value in logs]


def deviation_of(value: float, values: Sequence[float], least_spread: float, most_spread: float) -> float:
    """As ``log_deviations``, of one value among ``values``; the spread is at least and at most the given ones."""
    center, spread = _center_and_spread([math.log(max(each, 1e-3)) for each in values])
    return (math.log(max(value, 1e-3)) - center) / min(max(spread, least_spread), most_spread)


def _center_and_spread(logs: Sequence[float]) -> tuple[float, float]:
    center = median(logs)
    return center, MAD_TO_SIGMA * median([abs(value - center) for value in logs])


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation; 0.0 for fewer than two values, or a mean of 0."""
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return statistics.stdev(values) / abs(mean) if mean else 0.0


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's correlation; 0.0 if one of them does not vary."""
    try:
        return statistics.correlation(left, right)
    except statistics.StatisticsError:
        return 0.0


def ks_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """The Kolmogorov-Smirnov distance: the largest difference of both distribution functions, from 0 to 1.

    1.0 if either has no values.
    """
    if not left or not right:
        return 1.0
    left, right = sorted(left), sorted(right)
    return max(abs(bisect_right(left, x) / len(left) - bisect_right(right, x) / len(right)) for x in (*left, *right))


def resistant_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope through the medians of the outer thirds of ``points`` (Tukey, "Exploratory Data Analysis").

    A few outliers do not move it. Neither value is negative. With too few points, or too little spread in x, the fixed
    part of y is unknown: the intercept is then 0 and the slope is the median of y / x.
    """
    ordered = sorted(points)
    third = len(ordered) // 3
    if third >= _MIN_THIRD:
        left, right = ordered[:third], ordered[-third:]
        x_left, x_right = median([x for x, _ in left]), median([x for x, _ in right])
        if x_right > _APART * x_left:
            slope = (median([y for _, y in right]) - median([y for _, y in left])) / (x_right - x_left)
            intercept = median([y - slope * x for x, y in ordered])
            if slope > 0 and intercept >= 0:
                return intercept, slope
    return 0.0, median([y / x for x, y in ordered if x > 0])


def median_slope(values: Sequence[float]) -> float:
    """The median of the slopes between any two of ``values``, which are at the places 0, 1, … (Theil and Sen).

    Bisection finds it in far less than quadratic time: the pairs below a slope are the inversions around its line.
    """
    steps = [right - left for left, right in pairwise(values)]
    num_pairs = len(values) * len(steps) // 2
    found = []
    for rank in {(num_pairs + 1) // 2, num_pairs // 2 + 1}:
        low, high = min(steps), max(steps)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if _num_at_most(middle, values) >= rank else (middle, high)
        found.append(high)
    return median(found)


def _num_at_most(slope: float, values: Sequence[float]) -> int:
    """How many pairs of ``values`` have at most this slope."""
    number = 0
    before: list[float] = []
    for place, value in enumerate(values):
        above = value - slope * place
        number += place - bisect_left(before, above)
        insort(before, above)
    return number


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of ``items``, evenly spread, including the first and last."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def longest(items: Sequence[T], most: int, seconds: Callable[[T], float]) -> list[T]:
    """At most ``most`` of ``items``, those that took longest, in their original order."""
    if len(items) <= most:
        return list(items)
    kept = sorted(range(len(items)), key=lambda place: -seconds(items[place]))[:most]
    return [items[place] for place in sorted(kept)]
