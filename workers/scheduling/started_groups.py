"""Groups that have begun, with the rollouts of them that are to be started."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import RolloutKey, WaitingGroup


@dataclass(eq=False)
class StartedGroup:
    """One of them. ``engine`` is where its newest rollout went."""

    group: WaitingGroup
    number: int
    """In the order in which they began."""
    left: deque[int] = field(default_factory=deque)
    """Numbers of the rollouts to start."""
    engine: str | None = None
    num_running: int = 0
    rank: float | None = None
    """As it stands in the order; None where it does not."""

    def choose_engine(self, loads: EngineLoads, affinity: float) -> str | None:
        """Its engine, which has its prompt in the cache, up to ``affinity`` times the least load; else that with it."""
        least = loads.least()
        if least is None or not self._is_near(loads, affinity * loads.in_flight(least)):
            self.engine = least
        return self.engine

    def _is_near(self, loads: EngineLoads, most: float) -> bool:
        own = self.engine
        return own is not None and own in loads and not loads.is_full(own) and loads.in_flight(own) <= most


def num_left(started: StartedGroup) -> float:
    """The rank by which nearly complete groups come first."""
    return len(started.left)


class StartedGroups:
    """Those of the least ``rank`` first, of these the one that began first."""

    def __init__(self, rank: Callable[[StartedGroup], float] = num_left) -> None:
        self._rank = rank
        self._groups: dict[str, StartedGroup] = {}
        self._order: list[tuple[float, int, str]] = []
        """A heap; entries that are out of date are found when they come up."""
        self._in_turn: list[tuple[int, str]] = []
        """The same in the order in which they began."""
        self.num_begun = 0

    def get(self, group: str) -> StartedGroup | None:
        """The group of this id, unless nothing of it is left."""
        return self._groups.get(group)

    def begin(self, group: WaitingGroup) -> StartedGroup:
        """Take in a group that begins now, or begins afresh."""
        self.num_begun += 1
        started = StartedGroup(group, self.num_begun, deque(group.numbers))
        self._groups[group.group] = started
        self._take_turn(started)
        self.rank_anew(started)
        return started

    def first(self) -> StartedGroup | None:
        """The one whose rollouts come next; None if nothing is left to start."""
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
        """The one that began first, of those with rollouts to start."""
        while self._in_turn:
            number, key = self._in_turn[0]
            started = self._groups.get(key)
            if started is not None and started.number == number and started.left:
                return started
            heapq.heappop(self._in_turn)
        return None

    def take(self, started: StartedGroup) -> RolloutKey:
        """Its next rollout, which is started now."""
        number = started.left.popleft()
        started.num_running += 1
        self.rank_anew(started)
        return RolloutKey(started.group.group, number)

    def again(self, rollout: RolloutKey) -> None:
        """A rollout is to be started once more, before its siblings."""
        started = self._groups.get(rollout.group)
        if started is not None:
            started.num_running -= 1
            started.left.appendleft(rollout.number)
            self._take_turn(started)
            self.rank_anew(started)

    def ended(self, rollout: RolloutKey) -> None:
        """A rollout has ended for good."""
        started = self._groups.get(rollout.group)
        if started is not None:
            started.num_running -= 1
            if not started.left and not started.num_running:
                del self._groups[rollout.group]

    def drop(self, group: str) -> None:
        """Nothing of this group is started any more."""
        self._groups.pop(group, None)

    def rank_anew(self, started: StartedGroup) -> None:
        """Its rank may be another one now."""
        rank = self._rank(started)
        if started.left and rank != started.rank:
            started.rank = rank
            heapq.heappush(self._order, (rank, started.number, started.group.group))
            if len(self._order) > self._most:  # what is out of date below the top is never found
                ranked = [each for each in self._groups.values() if each.rank is not None]
                self._order = [(each.rank or 0.0, each.number, each.group.group) for each in ranked]
                heapq.heapify(self._order)

    def _take_turn(self, started: StartedGroup) -> None:
        heapq.heappush(self._in_turn, (started.number, started.group.group))
        if len(self._in_turn) > self._most:
            self._in_turn = sorted((each.number, key) for key, each in self._groups.items())

    @property
    def _most(self) -> int:
        """Entries of a heap that are kept."""
        return 8 * len(self._groups) + 64
