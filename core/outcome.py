"""How a rollout ended, the parts of its reward, and summary statistics. Only ``ok`` and ``truncated`` have a reward."""

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from forebay.core.errors import InvalidInput

MAX_REWARD_PARTS = 64
"""Maximum number of parts of a reward, and of different names of which a run has statistics."""


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

is_part_name = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch


def finite_number(value: object) -> float | None:
    """Convert a finite number to ``float``, also a scalar of numpy or torch; None for any other value."""
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = cast(Any, value).item()
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an int too large for a float
        return None
    return number if math.isfinite(number) else None


def read_reward_parts(given: object) -> dict[str, float]:
    """Return the named parts of a reward, ``{"exact": 1.0, "format": 0.4}``, as floats. Raises ``InvalidInput``."""
    if not isinstance(given, Mapping):
        raise _invalid(f"reward_parts must be a mapping of names to numbers (got {given!r:.100})")
    if len(given) > MAX_REWARD_PARTS:
        raise _invalid(f"a reward can have at most {MAX_REWARD_PARTS} parts (got {len(given)})")
    parts = dict[str, float]()
    for name, value in given.items():
        if not isinstance(name, str) or not is_part_name(name):
            raise _invalid(f"the name of a reward part must have 1 to 64 of A-Z a-z 0-9 . _ - (got {name!r:.100})")
        number = finite_number(value)
        if number is None:
            raise _invalid(f"the reward part {name!r} must be a finite number (got {value!r:.100})")
        parts[name] = number
    return parts


def reward_parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the named parts of a delivered row's reward; {} without any, or if the field holds something else."""
    try:
        return read_reward_parts(row.get("reward_parts", {}))
    except InvalidInput:  # hooks may change it, and other writers use the name for anything
        return {}


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(message, field="reward_parts")


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


def note_parts(tallies: dict[str, RewardTally], parts: Mapping[str, float]) -> bool:
    """Add the parts of a reward to those of a run; return whether its names are too many to have them all."""
    for name, part in parts.items():
        if name not in tallies and len(tallies) < MAX_REWARD_PARTS:
            tallies[name] = RewardTally()
        if name in tallies:
            tallies[name].note(part)
    return not parts.keys() <= tallies.keys()
