"""How a rollout ended, and summary statistics of rewards. Only ``ok`` and ``truncated`` have a reward."""

from dataclasses import dataclass
from enum import StrEnum


class RolloutOutcome(StrEnum):
    """What ended a rollout, and whether its reward counts."""

    OK = "ok"
    TRUNCATED = "truncated"
    """A limit on tokens or turns ended it; it was still judged."""
    ENGINE_FAILURE = "engine_failure"
    AGENT_FAILURE = "agent_failure"
    ENVIRONMENT_FAILURE = "environment_failure"
    JUDGE_FAILURE = "judge_failure"
    CANCELLED = "cancelled"
    """Its group was closed, or the run was stopped."""


REWARDED = frozenset({RolloutOutcome.OK, RolloutOutcome.TRUNCATED})
"""Outcomes that count in rewards."""


@dataclass(slots=True)
class RewardTally:
    """Summary statistics of rewards."""

    num: int = 0
    mean: float = 0.0
    least: float = 0.0
    greatest: float = 0.0

    def note(self, reward: float) -> None:
        """Add a reward."""
        self.num += 1
        # Not computed from a sum or a difference, which may overflow float64.
        self.mean += reward / self.num - self.mean / self.num
        if reward < self.least or self.num == 1:  # runs for each write: `min` costs several times as much
            self.least = reward
        if reward > self.greatest or self.num == 1:
            self.greatest = reward

    def as_json(self) -> dict[str, float | None]:
        """Return ``num``, ``mean``, ``min`` and ``max``; the last three are null without a reward."""
        if not self.num:
            return {"num": 0, "mean": None, "min": None, "max": None}
        return {"num": self.num, "mean": self.mean, "min": self.least, "max": self.greatest}
