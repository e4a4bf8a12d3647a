"""Formats figures, and thins series that are too long to draw."""

import math
from collections.abc import Iterable

MOST_POINTS = 2_000
"""The largest number of points in one line of a picture."""


def seconds_text(seconds: float | None) -> str:
    """``150 s``, ``84.5 s``, ``2.5 ms``; a dash if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    size = abs(seconds)
    if 0 < size < 0.1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:,.0f} s" if size >= 100 else f"{seconds:.3g} s"


def percent_text(percent: float | None) -> str:
    """``62 %``, ``7.4 %``; a dash if unknown."""
    return "-" if percent is None or not math.isfinite(percent) else f"{percent:.3g} %"


def share_text(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return "-" if share is None else percent_text(100 * share)


def number_text(number: float | None) -> str:
    """A number with digit groups and at most three significant digits below 1000; a dash if unknown."""
    if number is None or not math.isfinite(number):
        return "-"
    if float(number).is_integer() or abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def counted(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def short(number: float | None) -> float | None:
    """A number with six digits, which is enough for pictures and keeps the page small. None leaves a gap in a line."""
    if number is None or not math.isfinite(number):
        return None
    rounded = float(f"{number:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def shortened(numbers: Iterable[float | None]) -> list[float | None]:
    """``short`` of each number."""
    return [short(number) for number in numbers]
