"""Stretches of time as pairs of begin and end, in any unit."""

from collections.abc import Iterable
from typing import Any, TypeVar

Moment = TypeVar("Moment", int, float)


def union(intervals: Iterable[tuple[Moment, Moment]]) -> list[tuple[Moment, Moment]]:
    """The time that at least one of ``intervals`` covers, as intervals that do not touch, ascending.

    An interval that does not end after it begins covers nothing.
    """
    found: list[tuple[Moment, Moment]] = []
    for begin, end in sorted(each for each in intervals if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def covered(intervals: Iterable[tuple[Moment, Moment]]) -> Moment:
    """How long at least one of ``intervals`` lasts."""
    return sum((end - begin for begin, end in union(intervals)), start=0)


def covered_within(intervals: Iterable[tuple[Moment, Moment]], begin: Moment, end: Moment) -> Moment:
    """How much of the time from ``begin`` to ``end`` at least one of ``intervals`` covers."""
    return covered((max(left, begin), min(right, end)) for left, right in intervals)


def gaps(
    begin: Moment, end: Moment, intervals: Iterable[tuple[Moment, Moment, *tuple[Any, ...]]]
) -> list[tuple[Moment, Moment]]:
    """The stretches from ``begin`` to ``end`` that none of ``intervals``, in the order of their begin, covers."""
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
