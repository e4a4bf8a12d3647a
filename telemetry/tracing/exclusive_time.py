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


class TimePiece(NamedTuple):
    """A stretch of time during which the same spans were open."""

    begin: float
    end: float
    names: tuple[str, ...]
    """Names of the spans that share it; repeated if several spans have the same name."""
    turn: int | None = None
    """The number of the turn that began last."""


def exclusive_shares(intervals: Iterable[PlainInterval], begin: float, end: float) -> dict[str, float]:
    """Exclusive time by name from ``begin`` to ``end``, without unmeasured time."""
    shares: dict[str, float] = {}
    for first, last, names in _stretches(intervals, begin, end):
        if names:
            _split(last - first, names, shares)
    return shares


def rollout_pieces(
    intervals: Sequence[PlainInterval], turns: Iterable[TurnInterval], begin: float, end: float
) -> Iterator[TimePiece]:
    """One attempt of a rollout as named pieces in chronological order, without gaps, each with its turn."""
    for each in _named(intervals, turns, begin, end):
        yield TimePiece(*each)


def rollout_shares(
    intervals: Sequence[PlainInterval], turns: Iterable[TurnInterval], begin: float, end: float
) -> dict[int | None, dict[str, float]]:
    """The shares of ``rollout_pieces`` by turn number: before the first turn (None), and from each turn to the next."""
    found: dict[int | None, dict[str, float]] = {}
    for first, last, names, turn in _named(intervals, turns, begin, end):
        _split(last - first, names, found.setdefault(turn, {}))
    return found


def _split(time: float, names: tuple[str, ...], shares: dict[str, float]) -> None:
    share = time / len(names) if len(names) > 1 else time
    for name in names:
        shares[name] = shares.get(name, 0) + share


_Stretch = tuple[float, float, tuple[str, ...]]
_TOOL, _AGENT, _STARTING = ("tool",), ("agent",), ("starting",)


def _named(
    intervals: Sequence[PlainInterval], turns: Iterable[TurnInterval], begin: float, end: float
) -> Iterator[tuple[float, float, tuple[str, ...], int | None]]:
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
            yield from _Sweep(measured[number:beyond], known, begin, end).stretches()
        number, at = beyond, last
    if at < end:
        yield at, end, ()


_END, _BEGIN = 0, 1
_MAX_DEPTH = 64
"""Bound on the nesting in a damaged file."""


class _Sweep:
    """Tracks the open spans during a stretch in which several overlap."""

    def __init__(
        self, measured: Sequence[PlainInterval], known: Iterable[PlainInterval], begin: float, end: float
    ) -> None:
        ids = {each[3]: number for number, each in enumerate(measured) if each[3]}
        ups = {each[3]: each[4] for each in known if each[3]}
        self._names = [each[0] for each in measured]
        self._above = [_above(each[4], ups, ids) for each in measured]
        self._num_below = [0] * len(measured)
        self._is_open = [False] * len(measured)
        self._leaves: dict[int, None] = {}
        self._events: list[tuple[float, int, int]] = []
        for number, each in enumerate(measured):
            self._events += ((max(each[1], begin), _BEGIN, number), (min(each[2], end), _END, number))
        self._events.sort()

    def stretches(self) -> Iterator[_Stretch]:
        at = self._events[0][0]
        for moment, what, number in self._events:
            if moment > at:
                yield at, moment, tuple([self._names[leaf] for leaf in self._leaves])
                at = moment
            if what == _BEGIN:
                self._begin(number)
            else:
                self._end(number)

    def _begin(self, number: int) -> None:
        self._is_open[number] = True
        if not self._num_below[number]:
            self._leaves[number] = None
        for above in self._above[number]:
            self._num_below[above] += 1
            self._leaves.pop(above, None)

    def _end(self, number: int) -> None:
        self._is_open[number] = False
        self._leaves.pop(number, None)
        for above in self._above[number]:
            self._num_below[above] -= 1
            if not self._num_below[above] and self._is_open[above]:
                self._leaves[above] = None


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
