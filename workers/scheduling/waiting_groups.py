"""Groups that have not begun, in the order in which they came, and how often the oldest of them was passed over."""

import heapq
from collections import deque
from collections.abc import Iterator

from forebay.core.scheduling.policy import WaitingGroup


class WaitingGroups:
    """Every policy may begin later groups before earlier ones, each of those at most ``window`` times."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._groups: dict[str, tuple[int, WaitingGroup]] = {}
        self._in_turn: deque[tuple[int, str]] = deque()
        """As they came; those that wait no more go when they come up. A dict is slow to tell its first, once the
        earliest of many are gone."""
        self._num_submitted = 0
        self._ahead: list[int] = []
        """A heap: of the groups that have begun, the numbers of those that came after the oldest that has not."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        """Oldest first."""
        return (group for _, group in self._groups.values())

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def get(self, group: str) -> WaitingGroup | None:
        """The group of this id, if it waits."""
        return self._groups.get(group, (0, None))[1]

    @property
    def room(self) -> int:
        """How many more are looked at."""
        return max(0, self._window - len(self._groups))

    @property
    def oldest(self) -> WaitingGroup | None:
        """The one that came first."""
        return self._groups[self._in_turn[0][1]][1] if self._groups else None

    @property
    def overdue(self) -> WaitingGroup | None:
        """The oldest, if it must be the next to begin."""
        return self.oldest if len(self._ahead) >= self._window else None

    def submit(self, group: WaitingGroup) -> None:
        """Add one behind the others."""
        self.drop(group.group)
        self._num_submitted += 1
        self._groups[group.group] = self._num_submitted, group
        self._in_turn.append((self._num_submitted, group.group))

    def begin(self, group: str) -> WaitingGroup:
        """Take out one that begins now."""
        number, found = self._groups.pop(group)
        heapq.heappush(self._ahead, number)
        self._advance()
        return found

    def drop(self, group: str) -> None:
        """Take out one that will not begin, if it is there."""
        if self._groups.pop(group, None) is not None:
            self._advance()

    def _advance(self) -> None:
        while self._in_turn and self._groups.get(self._in_turn[0][1], (0, None))[0] != self._in_turn[0][0]:
            self._in_turn.popleft()
        oldest = self._in_turn[0][0] if self._in_turn else self._num_submitted + 1
        while self._ahead and self._ahead[0] < oldest:
            heapq.heappop(self._ahead)
