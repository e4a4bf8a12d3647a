"""How a rollout ended, and the rewards of a run in a few numbers. Only ``ok`` and ``truncated`` have a reward."""

from dataclasses import dataclass
from enum import StrEnum


class RolloutOutcome(StrEnum):
    """Who ended a rollout, and whether its reward counts."""

    OK = "ok"
    TRUNCATED = "truncated"
    """A limit on tokens or turns ended it; it was judged all the same."""
    ENGINE_FAILURE = "engine_failure"
    AGENT_FAILURE = "agent_failure"
    ENVIRONMENT_FAILURE = "environment_failure"
    JUDGE_FAILURE = "judge_failure"
    CANCELLED = "cancelled"
    """Its group was closed, or the run was stopped."""


REWARDED = frozenset({RolloutOutcome.OK, RolloutOutcome.TRUNCATED})
"""The outcomes that count in rewards."""


@dataclass(slots=True)
class RewardTally:
    """Rewards in a few numbers."""

    num: int = 0
    mean: float = 0.0
    least: float = 0.0
    greatest: float = 0.0

    def note(self, reward: float) -> None:
        """One more."""
        self.num += 1
        # Not by way of their sum or a difference, which may be beyond float64.
        self.mean += reward / self.num - self.mean / self.num
        if reward < self.least or self.num == 1:  # each write comes here: `min` costs several times as much
            self.least = reward
        if reward > self.greatest or self.num == 1:
            self.greatest = reward

    def as_json(self) -> dict[str, float | None]:
        """``num``, ``mean``, ``min`` and ``max``; the last three are null without a reward."""
        if not self.num:
            return {"num": 0, "mean": None, "min": None, "max": None}
        return {"num": self.num, "mean": self.mean, "min": self.least, "max": self.greatest}
