"""Started groups, with their rollouts that are left to start."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import RolloutKey, WaitingGroup


@dataclass(eq=False)
class StartedGroup:
    """A group that has begun. ``engine`` is the engine of its newest rollout."""

    group: WaitingGroup
    number: int
    """Position in the order in which groups began."""
    left: deque[int] = field(default_factory=deque)
    """Numbers of the rollouts left to start."""
    engine: str | None = None
    num_running: int = 0
    rank: float | None = None
    """Current rank; None if the group is not ranked."""

    def choose_engine(self, loads: EngineLoads, affinity: float) -> str | None:
        """Keep the group's engine, which has its prompt cached, up to ``affinity`` times the least load."""
        least = loads.least()
        if least is None or not self._is_near(loads, affinity * loads.in_flight(least)):
            self.engine = least
        return self.engine

    def _is_near(self, loads: EngineLoads, most: float) -> bool:
        own = self.engine
        return own is not None and own in loads and not loads.is_full(own) and loads.in_flight(own) <= most


def num_left(started: StartedGroup) -> float:
    """Rank by which nearly complete groups come first."""
    return len(started.left)


class StartedGroups:
    """Orders groups by the lowest ``rank``, then by their beginning."""

    def __init__(self, rank: Callable[[StartedGroup], float] = num_left) -> None:
        self._rank = rank
        self._groups: dict[str, StartedGroup] = {}
        self._order: list[tuple[float, int, str]] = []
        """A heap. Outdated entries are discarded when they reach the top."""
        self._in_turn: list[tuple[int, str]] = []
        """A heap in the order of beginning."""
        self.num_begun = 0

    def get(self, group: str) -> StartedGroup | None:
        """The group with this id, or None if none of its rollouts is left."""
        return self._groups.get(group)

    def begin(self, group: WaitingGroup) -> StartedGroup:
        """Add a group that begins, or begins again."""
        self.num_begun += 1
        started = StartedGroup(group, self.num_begun, deque(group.numbers))
        self._groups[group.group] = started
        self._take_turn(started)
        self.update_rank(started)
        return started

    def first(self) -> StartedGroup | None:
        """The group whose rollouts come next; None if no rollout is left to start."""
        while self._order:
            rank, number, key = self._order[0]
            started = self._groups.get(key)
            if started is not None and (started.rank, started.number) == (rank, number):
                if started.left:
                    return started
                started.rank = None
            heapq.heappop(self._order)
        return None

    @property
    def oldest(self) -> StartedGroup | None:
        """The group that began first among those with rollouts left to start."""
        while self._in_turn:
            number, key = self._in_turn[0]
            started = self._groups.get(key)
            if started is not None and started.number == number and started.left:
                return started
            heapq.heappop(self._in_turn)
        return None

    def take(self, started: StartedGroup) -> RolloutKey:
        """Remove and return its next rollout, which is started now."""
        number = started.left.popleft()
        started.num_running += 1
        self.update_rank(started)
        return RolloutKey(started.group.group, number)

    def again(self, rollout: RolloutKey) -> None:
        """Queue a rollout again, before its siblings."""
        started = self._groups.get(rollout.group)
        if started is not None:
            started.num_running -= 1
            started.left.appendleft(rollout.number)
            self._take_turn(started)
            self.update_rank(started)

    def ended(self, rollout: RolloutKey) -> None:
        """Record the final end of a rollout."""
        started = self._groups.get(rollout.group)
        if started is not None:
            started.num_running -= 1
            if not started.left and not started.num_running:
                del self._groups[rollout.group]

    def drop(self, group: str) -> None:
        """Remove a group."""
        self._groups.pop(group, None)

    def update_rank(self, started: StartedGroup) -> None:
        """Update its rank in the order."""
        rank = self._rank(started)
        if started.left and rank != started.rank:
            started.rank = rank
            heapq.heappush(self._order, (rank, started.number, started.group.group))
            if len(self._order) > self._most:  # outdated entries are only discarded at the top
                ranked = [each for each in self._groups.values() if each.rank is not None]
                self._order = [(each.rank or 0.0, each.number, each.group.group) for each in ranked]
                heapq.heapify(self._order)

    def _take_turn(self, started: StartedGroup) -> None:
        heapq.heappush(self._in_turn, (started.number, started.group.group))
        if len(self._in_turn) > self._most:
            self._in_turn = sorted((each.number, key) for key, each in self._groups.items())

    @property
    def _most(self) -> int:
        """Most entries that a heap may have."""
        return 8 * len(self._groups) + 64
