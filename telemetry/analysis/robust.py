"""Statistics that a few wild values do not move. Plain Python: a report needs no numpy."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
MAD_TO_SIGMA = 1.4826
"""The median of absolute deviations, as a standard deviation, were the values normal."""
MIN_LOG_SPREAD = 0.02
"""Values nearer to each other than this are alike: otherwise a tenth of a per cent would be an outlier among equals."""
_MIN_THIRD = 3
"""Of fewer points, one that lies far off moves their median."""
_APART = 1.25
"""Nearer to each other than by this factor, the noise of two thirds is steeper than any line through them."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, with linear interpolation; 0.0 for none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """0.0 for none."""
    return statistics.median(values) if values else 0.0


def log_deviations(values: Sequence[float], least_spread: float = MIN_LOG_SPREAD) -> list[float]:
    """How many robust standard deviations the logarithm of each lies above (below: negative) the median one.

    Iglewicz and Hoaglin, "How to Detect and Handle Outliers", with logarithms, because durations are skewed.
    """
    logs = [math.log(max(value, 1e-9)) for value in values]
    center = median(logs)
    spread = max(MAD_TO_SIGMA * median([abs(value - center) for value in logs]), least_spread)
    return [(value - center) / spread for value in logs]


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation; 0.0 for fewer than two values, or a mean of 0."""
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return statistics.stdev(values) / abs(mean) if mean else 0.0


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's; 0.0 where one of them does not vary."""
    try:
        return statistics.correlation(left, right)
    except statistics.StatisticsError:
        return 0.0


def resistant_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope through the medians of the outer thirds of ``points`` (Tukey, "Exploratory Data Analysis").

    A few points that lie far off do not move it. Neither is negative. With too few points, or all near one place,
    nobody can tell how much of y is fixed: the slope is the usual y by x then.
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
    """At most ``most`` of ``items``, evenly spread, first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def longest(items: Sequence[T], most: int, seconds: Callable[[T], float]) -> list[T]:
    """At most ``most`` of ``items``, those that took longest, in the order that they had."""
    if len(items) <= most:
        return list(items)
    kept = sorted(range(len(items)), key=lambda place: -seconds(items[place]))[:most]
    return [items[place] for place in sorted(kept)]
