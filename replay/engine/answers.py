"""The answers to equal requests: the k-th request gets the k-th, of its own lane first, and none is given twice."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field


class AllGiven(Exception):
    """The request was recorded, and every answer has been given."""

    def __init__(self, num_answers: int) -> None:
        super().__init__(num_answers)
        self.num_answers = num_answers


@dataclass(slots=True)
class EqualAnswers:
    """Those of equal requests. ``lanes`` has the numbers of all, ``left`` of those that were not given yet."""

    lanes: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    left: dict[str, deque[int]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    """The one that was given last in a lane."""

    @property
    def first(self) -> int:
        return min(min(lane) for lane in self.lanes.values())

    def add(self, lane: str, seq: int) -> None:
        """One more, that may be given."""
        self.lanes[lane].append(seq)
        self.left.setdefault(lane, deque()).append(seq)

    def pop(self, lane: str) -> int | None:
        """The next one: of this lane, of none, of any; None where all have been given."""
        own = self.left.get(lane) or self.left.get("") or self._of_another()
        return own.popleft() if own else None

    def refill(self, lane: str) -> None:
        """Let the answers of this lane be given once more, those of all lanes where it had none."""
        for each in [lane] if lane in self.lanes else list(self.lanes):
            self.left[each] = deque(self.lanes[each])

    def _of_another(self) -> deque[int] | None:
        begun = [lane for lane in self.left.values() if lane]
        return min(begun, key=lambda lane: lane[0], default=None)


def likeness(one: bytes, other: bytes) -> float:
    """The share of both that is the same from the beginning on, and from the end."""
    size = min(len(one), len(other))
    begin = _num_equal(size, lambda count: one[:count] == other[:count])
    end = _num_equal(size - begin, lambda count: one[len(one) - count :] == other[len(other) - count :])
    return (begin + end) / max(len(one), len(other), 1)


def _num_equal(size: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to ``size`` for which it holds, as it does for all that are smaller."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
