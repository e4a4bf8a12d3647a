"""Rollouts that wait for one engine each, and how many it was given already."""

from collections import deque
from collections.abc import Collection

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.workers.scheduling.rollout_line import ProbedGroup, RolloutLine


class InPlace:
    """A line for each engine. A decision looks at no engine twice, however many wait in how many lines.

    An engine has room for ``times`` its places.
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
