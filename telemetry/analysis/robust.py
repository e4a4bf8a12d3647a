"""Statistics that are robust against outliers. Plain Python, so that a report does not need numpy."""

import math
import statistics
from collections.abc import Callable, Sequence
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
