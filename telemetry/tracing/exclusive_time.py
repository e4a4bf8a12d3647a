"""Exclusive time: at each moment, the open spans without open children share it equally, so that times add up.

Works with any clock, in integer nanoseconds or seconds. Unmeasured time in a rollout is ``tool`` after a turn that
called tools, ``starting`` before the first turn, else ``agent``.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

CONTAINERS = frozenset({"attempt", "turn"})
"""Spans that only group others; their own time is not counted."""

ENDINGS = frozenset({"reward_queue", "reward", "group", "write", "retry"})
"""Phases that show that a rollout's last tool calls have ended, whatever the last turn called."""


class Interval(NamedTuple):
    """The timing data of a span."""

    name: str
    begin: float
    end: float
    id: str = ""
    up: str = ""
    """The ``id`` of the enclosing span; "" or an unknown id means none."""


PlainInterval = tuple[str, float, float, str, str]
"""An ``Interval``, or an equal plain tuple, which is created faster for every span recorded."""


class TurnInterval(NamedTuple):
    """A turn; the time until the next one belongs to it."""

    number: int
    begin: float
    end: float
    has_tools: bool = False


TimePiece = tuple[float, float, tuple[str, ...], int | None]
"""Begin and end of a stretch, the names of the spans that share it, and the number of the turn that began last."""

_TOOL, _AGENT, _STARTING = ("tool",), ("agent",), ("starting",)


def rollout_pieces(
    intervals: Sequence[PlainInterval], turns: Iterable[TurnInterval], begin: float, end: float
) -> Iterator[TimePiece]:
    """One attempt of a rollout as named pieces in chronological order, without gaps, each with its turn."""
    ahead = sorted(turns, key=itemgetter(1), reverse=True)
    next_begin = ahead[-1][1] if ahead else end
    # Not before the first turn: there, ``write`` is the announcement of the group.
    tools_end = min([each[1] for each in intervals if each[0] in ENDINGS and each[1] >= next_begin], default=end)
    number: int | None = None
    turn_end, has_tools = end, False
    first = begin
    for _, last, names in _stretches(intervals, begin, end):
        while first < last:
            while next_begin <= first and ahead:
                number, _, turn_end, has_tools = ahead.pop()
                next_begin = ahead[-1][1] if ahead else end
            until = next_begin if next_begin < last else last
            shown = names
            if not names:
                if has_tools:
                    if first < turn_end < until:
                        until = turn_end
                    if first < tools_end < until:
                        until = tools_end
                if number is None and ahead:
                    shown = _STARTING
                else:
                    shown = _TOOL if has_tools and turn_end <= first < tools_end else _AGENT
            yield first, until, shown, number
            first = until


def rollout_shares(
    intervals: Sequence[PlainInterval], turns: Iterable[TurnInterval], begin: float, end: float
) -> dict[int | None, dict[str, float]]:
    """The shares of ``rollout_pieces`` by turn number: before the first turn (None), and from each turn to the next."""
    found: dict[int | None, dict[str, float]] = {}
    for first, last, names, turn in rollout_pieces(intervals, turns, begin, end):
        shares, share = found.setdefault(turn, {}), (last - first) / len(names)
        for name in names:
            shares[name] = shares.get(name, 0) + share
    return found


_Stretch = tuple[float, float, tuple[str, ...]]


def _stretches(intervals: Iterable[PlainInterval], begin: float, end: float) -> Iterator[_Stretch]:
    known = list(intervals)
    measured = [
        each for each in known if each[1] < end and each[2] > begin and each[1] < each[2] and each[0] not in CONTAINERS
    ]
    measured.sort(key=itemgetter(1))
    at = begin
    number, size = 0, len(measured)
    while number < size:
        name, first, last, _, _ = measured[number]
        beyond = number + 1
        while beyond < size and measured[beyond][1] < last:
            last = max(last, measured[beyond][2])
            beyond += 1
        first, last = max(first, begin), min(last, end)
        if at < first:
            yield at, first, ()
        if beyond == number + 1:  # the usual case: no other span overlaps it
            yield first, last, (name,)
        else:
            yield from _sweep(measured[number:beyond], known, begin, end)
        number, at = beyond, last
    if at < end:
        yield at, end, ()


_MAX_DEPTH = 64
"""Bound on the nesting in a damaged file."""


def _sweep(
    measured: Sequence[PlainInterval], known: Iterable[PlainInterval], begin: float, end: float
) -> Iterator[_Stretch]:
    """The stretches while several spans overlap: at each moment, those are open in which no other one is."""
    ids = {each[3]: number for number, each in enumerate(measured) if each[3]}
    ups = {each[3]: each[4] for each in known if each[3]}
    names = [each[0] for each in measured]
    above = [_above(each[4], ups, ids) for each in measured]
    edges = [(max(each[1], begin), 1, number) for number, each in enumerate(measured)]
    edges += [(min(each[2], end), -1, number) for number, each in enumerate(measured)]
    edges.sort()
    num_below = [0] * len(measured)
    is_open = [False] * len(measured)
    leaves: dict[int, None] = {}
    at = edges[0][0]
    for moment, change, number in edges:
        if moment > at:
            yield at, moment, tuple([names[leaf] for leaf in leaves])
            at = moment
        is_open[number] = change > 0
        if is_open[number] and not num_below[number]:
            leaves[number] = None
        else:
            leaves.pop(number, None)
        for up in above[number]:
            num_below[up] += change
            if is_open[up] and not num_below[up]:
                leaves[up] = None
            else:
                leaves.pop(up, None)


def _above(up: str, ups: dict[str, str], ids: dict[str, int]) -> tuple[int, ...]:
    """The indices of all spans around the one below ``up``, skipping containers."""
    found: list[int] = []
    for _ in range(_MAX_DEPTH):
        if not up:
            break
        if up in ids:
            found.append(ids[up])
        up = ups.get(up, "")
    return tuple(found)
