"""Rollouts that wait to be started: for any engine, or for one."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import WaitingGroup
from forebay.workers.scheduling.probe_ranking import Measured


@dataclass(eq=False, slots=True)
class ProbedGroup:
    """A group with its probe, from its submission until nothing of it is left."""

    group: WaitingGroup
    window: int
    """Its number: groups of one window are ranked together."""
    probe: int | None
    """The number of the rollout that is its probe; None if it has a sample already."""
    is_probing: bool
    """Whether its probe is not there."""
    has_begun: bool
    measured: Measured | None = None
    """None while that is not known, and where it never will be."""
    is_long: bool = False
    engine: str | None = None
    """Where its probe ran, or where its rollouts go instead."""
    cap: int | None = None
    waiting: dict[int, bool] = field(default_factory=dict)
    """The rollouts that are to be started, by number; whether on a heavy engine."""
    running: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Those that were started: the engine that was chosen, and whether as a heavy one."""


class RolloutLine:
    """First come, first served, but those of groups that have begun before the others.

    Whatever does not wait any more is passed over when it comes up.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[ProbedGroup, int]] = deque()
        self._others: deque[tuple[ProbedGroup, int]] = deque()

    def add(self, group: ProbedGroup, number: int, *, is_first: bool = False) -> None:
        """Put a rollout at the end, or before all others."""
        line = self._begun if group.has_begun else self._others
        if is_first:
            line.appendleft((group, number))
        else:
            line.append((group, number))

    def take(self, *, may_begin: bool) -> tuple[ProbedGroup, int] | None:
        """The next rollout, taken out; without ``may_begin`` only one of a group that has begun."""
        for line in (self._begun, self._others):
            while line and line[0][1] not in line[0][0].waiting:
                line.popleft()
            if line and (may_begin or line[0][0].has_begun):
                return line.popleft()
        return None

    def drain(self) -> list[tuple[ProbedGroup, int]]:
        """Everything that waits, taken out."""
        entries = [entry for entry in (*self._begun, *self._others) if entry[1] in entry[0].waiting]
        self._begun.clear()
        self._others.clear()
        return entries


class EngineQueues:
    """Rollouts that wait for one engine each, and how many it was given already.

    A decision looks at no engine twice, however many wait in how many lines. An engine has room for ``times`` its
    places.
    """

    def __init__(self, times: float) -> None:
        self._times = times
        self._lines: dict[str, RolloutLine] = {}
        self._counts: dict[str, int] = {}
        """Of what was chosen for each engine, the rollouts that have not ended."""
        self._next: deque[str] = deque()
        """Engines that may have both a rollout in their line and room for it, in turn."""
        self._is_next: set[str] = set()

    def has_room(self, engine: str, loads: EngineLoads) -> bool:
        """Whether another rollout may be started there."""
        return self._counts.get(engine, 0) < max(1, int(self._times * loads.places(engine)))

    def add(self, group: ProbedGroup, number: int, *, is_first: bool = False) -> None:
        """A rollout waits for the engine of its group, which has begun there."""
        assert group.engine is not None
        self._lines.setdefault(group.engine, RolloutLine()).add(group, number, is_first=is_first)
        self._note(group.engine)

    def take(self, loads: EngineLoads) -> tuple[ProbedGroup, int] | None:
        """The next rollout for an engine that has room, the engines taking turns."""
        while self._next:
            engine = self._next.popleft()
            line = self._lines.get(engine)
            # What is left out here is looked at again when a rollout leaves the engine, or joins its line.
            if line is not None and self.has_room(engine, loads) and (found := line.take(may_begin=True)) is not None:
                self._next.append(engine)
                return found
            self._is_next.discard(engine)
        return None

    def entered(self, engine: str) -> None:
        """A rollout was chosen for an engine, out of whichever line."""
        self._counts[engine] = self._counts.get(engine, 0) + 1

    def left(self, engine: str) -> None:
        """It has ended."""
        self._counts[engine] -= 1
        if not self._counts[engine]:
            del self._counts[engine]
        if engine in self._lines:
            self._note(engine)

    def keep(self, engines: Collection[str]) -> list[tuple[ProbedGroup, int]]:
        """What waits for others than these, taken out."""
        gone = [engine for engine in self._lines if engine not in engines]
        return [entry for engine in gone for entry in self._lines.pop(engine).drain()]

    def _note(self, engine: str) -> None:
        if engine not in self._is_next:
            self._is_next.add(engine)
            self._next.append(engine)
