"""Rollouts that wait to be started, in order."""

from collections import deque
from dataclasses import dataclass, field

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
