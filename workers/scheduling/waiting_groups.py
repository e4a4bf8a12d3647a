"""Groups that have not begun, in order of submission, and how often the oldest was overtaken."""

import heapq
from collections import deque
from collections.abc import Iterator

from forebay.core.scheduling.policy import WaitingGroup


class WaitingGroups:
    """Waiting groups. A policy may begin later ones first, but at most ``window`` groups may overtake each."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._groups: dict[str, tuple[int, WaitingGroup]] = {}
        self._in_turn: deque[tuple[int, str]] = deque()
        """Order of submission; outdated entries are skipped at the front. A dict finds its first key slowly after many
        removals."""
        self._num_submitted = 0
        self._ahead: list[int] = []
        """A heap of the numbers of started groups that were submitted after the oldest waiting one."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        """Iterate over groups, oldest first."""
        return (group for _, group in self._groups.values())

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def get(self, group: str) -> WaitingGroup | None:
        """The group with this id, if it is waiting."""
        return self._groups.get(group, (0, None))[1]

    @property
    def room(self) -> int:
        """Number of further groups that are accepted."""
        return max(0, self._window - len(self._groups))

    @property
    def oldest(self) -> WaitingGroup | None:
        """The group that was submitted first."""
        return self._groups[self._in_turn[0][1]][1] if self._groups else None

    @property
    def overdue(self) -> WaitingGroup | None:
        """The oldest group if it must be the next to begin, or None."""
        return self.oldest if len(self._ahead) >= self._window else None

    def submit(self, group: WaitingGroup) -> None:
        """Add a group at the end."""
        self.drop(group.group)
        self._num_submitted += 1
        self._groups[group.group] = self._num_submitted, group
        self._in_turn.append((self._num_submitted, group.group))

    def begin(self, group: str) -> WaitingGroup:
        """Remove and return a group that begins now."""
        number, found = self._groups.pop(group)
        heapq.heappush(self._ahead, number)
        self._advance()
        return found

    def drop(self, group: str) -> None:
        """Remove a group that will not begin, if present."""
        if self._groups.pop(group, None) is not None:
            self._advance()

    def _advance(self) -> None:
        while self._in_turn and self._groups.get(self._in_turn[0][1], (0, None))[0] != self._in_turn[0][0]:
            self._in_turn.popleft()
        oldest = self._in_turn[0][0] if self._in_turn else self._num_submitted + 1
        while self._ahead and self._ahead[0] < oldest:
            heapq.heappop(self._ahead)
