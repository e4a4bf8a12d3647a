"""Queues of rollouts that wait to be started, for any engine or for one."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import WaitingGroup
from forebay.workers.scheduling.probe_ranking import Measured


@dataclass(eq=False, slots=True)
class ProbedGroup:
    """A group with its probe, from its submission until none of its rollouts is left."""

    group: WaitingGroup
    window: int
    """Number of its window. Groups of one window are ranked together."""
    probe: int | None
    """Number of the rollout that is its probe; None if it already has a sample."""
    is_probing: bool
    """Whether its probe has not ended."""
    has_begun: bool
    measured: Measured | None = None
    """Length of its probe; None if not known, or not yet."""
    is_long: bool = False
    engine: str | None = None
    """Engine of its probe, or the engine that replaced it for its rollouts."""
    cap: int | None = None
    waiting: dict[int, bool] = field(default_factory=dict)
    """Whether for a heavy engine, by number of each rollout to start."""
    running: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Engine, and whether as a heavy one, by number of each running rollout."""


class RolloutLine:
    """A first-in, first-out queue in which rollouts of started groups come before others.

    Entries that no longer wait are skipped when they reach the front.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[ProbedGroup, int]] = deque()
        self._others: deque[tuple[ProbedGroup, int]] = deque()

    def add(self, group: ProbedGroup, number: int, *, is_first: bool = False) -> None:
        """Add a rollout at the end, or at the front."""
        line = self._begun if group.has_begun else self._others
        if is_first:
            line.appendleft((group, number))
        else:
            line.append((group, number))

    def take(self, *, may_begin: bool) -> tuple[ProbedGroup, int] | None:
        """Remove and return the next rollout; without ``may_begin``, only one of a started group."""
        for line in (self._begun, self._others):
            while line and line[0][1] not in line[0][0].waiting:
                line.popleft()
            if line and (may_begin or line[0][0].has_begun):
                return line.popleft()
        return None

    def drain(self) -> list[tuple[ProbedGroup, int]]:
        """Remove and return all waiting rollouts."""
        entries = [entry for entry in (*self._begun, *self._others) if entry[1] in entry[0].waiting]
        self._begun.clear()
        self._others.clear()
        return entries


class EngineQueues:
    """Queues of rollouts that wait for a specific engine, and counts of the rollouts that each engine has.

    A decision considers each engine at most once, regardless of the number of waiting rollouts. An engine has room for
    ``times`` its slots.
    """

    def __init__(self, times: float) -> None:
        self._times = times
        self._lines: dict[str, RolloutLine] = {}
        self._counts: dict[str, int] = {}
        """Rollouts that were started on each engine and have not ended."""
        self._next: deque[str] = deque()
        """Engines that may have both a queued rollout and room for it, in round-robin order."""
        self._is_next: set[str] = set()

    def has_room(self, engine: str, loads: EngineLoads) -> bool:
        """Whether another rollout may be started there."""
        return self._counts.get(engine, 0) < max(1, int(self._times * loads.places(engine)))

    def add(self, group: ProbedGroup, number: int, *, is_first: bool = False) -> None:
        """Queue a rollout for the engine of its group."""
        assert group.engine is not None
        self._lines.setdefault(group.engine, RolloutLine()).add(group, number, is_first=is_first)
        self._note(group.engine)

    def take(self, loads: EngineLoads) -> tuple[ProbedGroup, int] | None:
        """Remove and return the next rollout for an engine with room. Engines take turns."""
        while self._next:
            engine = self._next.popleft()
            line = self._lines.get(engine)
            # A skipped engine is considered again when a rollout leaves it or joins its queue.
            if line is not None and self.has_room(engine, loads) and (found := line.take(may_begin=True)) is not None:
                self._next.append(engine)
                return found
            self._is_next.discard(engine)
        return None

    def entered(self, engine: str) -> None:
        """Count a rollout, from any queue, that was started on an engine."""
        self._counts[engine] = self._counts.get(engine, 0) + 1

    def left(self, engine: str) -> None:
        """Count the end of a rollout."""
        self._counts[engine] -= 1
        if not self._counts[engine]:
            del self._counts[engine]
        if engine in self._lines:
            self._note(engine)

    def keep(self, engines: Collection[str]) -> list[tuple[ProbedGroup, int]]:
        """Remove and return the rollouts that wait for engines other than these."""
        gone = [engine for engine in self._lines if engine not in engines]
        return [entry for engine in gone for entry in self._lines.pop(engine).drain()]

    def _note(self, engine: str) -> None:
        if engine not in self._is_next:
            self._is_next.add(engine)
            self._next.append(engine)
