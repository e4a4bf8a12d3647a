"""Operations on intervals of time: pairs of begin and end, in any unit."""

from collections.abc import Iterable
from typing import Any, TypeVar

Moment = TypeVar("Moment", int, float)


def union(intervals: Iterable[tuple[Moment, Moment]]) -> list[tuple[Moment, Moment]]:
    """The time covered by at least one of ``intervals``, as ascending intervals that do not touch.

    An interval whose end is not after its begin covers nothing.
    """
    found: list[tuple[Moment, Moment]] = []
    for begin, end in sorted(each for each in intervals if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def covered(intervals: Iterable[tuple[Moment, Moment]]) -> Moment:
    """The total time covered by at least one of ``intervals``."""
    return sum((end - begin for begin, end in union(intervals)), start=0)


def covered_within(intervals: Iterable[tuple[Moment, Moment]], begin: Moment, end: Moment) -> Moment:
    """The time from ``begin`` to ``end`` that is covered by at least one of ``intervals``."""
    return covered((max(left, begin), min(right, end)) for left, right in intervals)


def gaps(
    begin: Moment, end: Moment, intervals: Iterable[tuple[Moment, Moment, *tuple[Any, ...]]]
) -> list[tuple[Moment, Moment]]:
    """The parts of ``begin`` to ``end`` that no interval covers. ``intervals`` must be ordered by begin."""
    found = []
    for left, right, *_ in intervals:
        if left >= end:
            break
        if left > begin:
            found.append((begin, left))
        if right > begin:
            begin = right
    if begin < end:
        found.append((begin, end))
    return found
