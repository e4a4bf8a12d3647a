"""Whose time each moment was: that of the deepest event that was open, shared equally where several were."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple


class TimedEvent(NamedTuple):
    """One event as a stretch of time. It counts where nothing deeper is open."""

    begin_s: float
    end_s: float
    depth: int
    phase: str


class OpenPart(NamedTuple):
    """Between two changes of what is open."""

    begin_s: float
    end_s: float
    phases: tuple[str, ...]
    """Of the deepest events; each has an equal part. Empty where none is open."""


def segments(timed_events: list[TimedEvent], begin_s: float, end_s: float) -> Iterator[OpenPart]:
    """All of ``begin_s`` to ``end_s``, in the order of time."""
    clipped = [
        TimedEvent(max(one.begin_s, begin_s), min(one.end_s, end_s), one.depth, one.phase)
        for one in timed_events
        if one.end_s > begin_s and one.begin_s < end_s and one.end_s > one.begin_s
    ]
    clipped.sort()
    cuts = sorted({begin_s, end_s, *(one.begin_s for one in clipped), *(one.end_s for one in clipped)})
    open_now: list[TimedEvent] = []
    number = 0
    for left, right in pairwise(cuts):
        open_now = [one for one in open_now if one.end_s > left]
        while number < len(clipped) and clipped[number].begin_s <= left:
            open_now.append(clipped[number])
            number += 1
        deepest = max((one.depth for one in open_now), default=0)
        yield OpenPart(left, right, tuple(one.phase for one in open_now if one.depth == deepest))


def seconds_by_phase(parts: list[OpenPart], unmeasured: str = "") -> dict[str, float]:
    """Seconds of each phase; what nothing measured is ``unmeasured``, or left out where that is empty."""
    seconds: dict[str, float] = {}
    for part in parts:
        phases = part.phases or ((unmeasured,) if unmeasured else ())
        for phase in phases:
            seconds[phase] = seconds.get(phase, 0.0) + (part.end_s - part.begin_s) / len(phases)
    return seconds
