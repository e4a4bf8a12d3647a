"""Samples that wait for the rest of their group: where groups are put off, they are stored whole or not at all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forebay.client.sample_writer.outbox import Sample
from forebay.generators.rollouts.rollout_trace import RolloutTrace


@dataclass
class FinishedRollout:
    """One that has ended with samples, and what it adds to the counts: if they are used, or are thrown away."""

    samples: list[Sample]
    trace: RolloutTrace
    used: Mapping[str, int] = field(default_factory=dict)
    thrown: Mapping[str, int] = field(default_factory=dict)


class HeldBack:
    """Finished rollouts by the ids of their groups."""

    def __init__(self) -> None:
        self._rollouts: dict[str, list[FinishedRollout]] = {}

    def add(self, group: str, rollout: FinishedRollout) -> None:
        """Its samples wait from now on."""
        self._rollouts.setdefault(group, []).append(rollout)

    def take(self, group: str) -> list[FinishedRollout]:
        """Those of a group that is whole."""
        return self._rollouts.pop(group, [])

    def throw_away(self, group: str) -> list[FinishedRollout]:
        """Those of a group that will not be whole: they are of no use to anybody."""
        thrown = self._rollouts.pop(group, [])
        for rollout in thrown:
            rollout.trace.ending = "aborted"
            rollout.trace.end()
        return thrown
