"""How a rollout ended. Only ``ok`` and ``truncated`` have a reward."""

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
