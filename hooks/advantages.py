"""Group arithmetic that is safe for every input: no values, one value, no spread, values near the end of float64."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeGuard, TypeVar

from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange

EPSILON = 1e-8
"""Added to a deviation before dividing by it; a smaller deviation counts as none."""

_LARGEST = sys.float_info.max
_SAFE = 1e300
"""Differences and deviations of rewards up to here are within float64."""

T = TypeVar("T")


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number; true and false are 1 and 0."""
    # Comparisons rule out NaN as well, and integers beyond float64, on which ``math.isfinite`` raises.
    return _is_real(value) and -_LARGEST <= value <= _LARGEST


def is_valid_reward(value: object, reward_range: RewardRange | None) -> TypeGuard[float]:
    """Whether ``value`` is a number within ``reward_range``; without one, a finite number."""
    if reward_range is None:
        return is_number(value)
    return _is_real(value) and reward_range[0] <= value <= reward_range[1]


def _is_real(value: object) -> TypeGuard[float]:
    # The exact type first: almost every reward has it, and this is asked for each.
    return type(value) is float or isinstance(value, (int, float))


def bounded(value: float) -> float:
    """``value``, or the float64 nearest to it where it is infinite."""
    return max(-_LARGEST, min(_LARGEST, value))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 of nothing."""
    if not values:
        return 0.0
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond float64, the mean is not
        return bounded(2 * math.fsum(value / len(values) / 2 for value in values))


def deviation(values: Sequence[float]) -> float:
    """The population standard deviation; 0 of nothing."""
    return _deviation(values, mean(values)) if values else 0.0


def _deviation(values: Sequence[float], centre: float) -> float:
    # A sum of squares would overflow, or vanish, where the deviation itself does not.
    return bounded(math.hypot(*[value - centre for value in values]) / math.sqrt(len(values)))


def advantages(
    rewards: Sequence[object],
    rollout_ids: Sequence[str],
    normaliser: Normaliser,
    reward_range: RewardRange | None = SLIME_REWARD_RANGE,
) -> list[object]:
    """What each valid reward becomes within its group; what is not valid stays as it is, and counts nowhere.

    With r the rewards of n rollouts, m their mean and s their population deviation:

    - "grpo": (r - m) / (s + ε) (GRPO, arXiv:2402.03300, as in slime)
    - "rloo": r - mean of the other rollouts' rewards (RLOO, arXiv:2402.14740)
    - "dr_grpo": r - m (Dr. GRPO, arXiv:2503.20783)

    Rewards that share a rollout id other than "" are of one rollout: together they are one r, their mean, and all get
    what it becomes; no ids at all mean as many rollouts as rewards. Rewards that are all zero stay zero, and rewards
    without spread become zero.
    """
    valid = [place for place, reward in enumerate(rewards) if is_valid_reward(reward, reward_range)]
    numbers = [reward for reward in rewards if is_valid_reward(reward, reward_range)]
    kept_ids = [rollout_ids[place] for place in valid] if rollout_ids else ()
    made = list(rewards)
    for place, advantage in zip(valid, valid_advantages(numbers, kept_ids, normaliser), strict=True):
        made[place] = advantage
    return made


def valid_advantages(rewards: Sequence[float], rollout_ids: Sequence[str], normaliser: Normaliser) -> Sequence[float]:
    """The same where every reward is valid."""
    if not any(rewards):
        return rewards
    if not any(rollout_ids):
        return _centred(rewards, normaliser)
    # A row without an id is a rollout of its own: its place is an int, and so no id.
    keys: list[object] = [rollout or place for place, rollout in enumerate(rollout_ids)]
    forks: dict[object, list[float]] = {}
    for key, reward in zip(keys, rewards, strict=True):
        forks.setdefault(key, []).append(reward)
    # Equal rewards as they are: the mean of equal numbers may be another one in its last digit.
    common = [group[0] if min(group) == max(group) else mean(group) for group in forks.values()]
    made = dict(zip(forks, _centred(common, normaliser), strict=True))
    return [made[key] for key in keys]


def _centred(rewards: Sequence[float], normaliser: Normaliser) -> Sequence[float]:
    """One advantage for each rollout's reward."""
    low, high = min(rewards), max(rewards)
    if low == high:  # a single one, too; the mean of equal numbers may be another one in its last digit
        return [0.0] * len(rewards)
    if max(-low, high) > _SAFE:
        return _centred_far(rewards, max(-low, high), normaliser)
    centre = mean(rewards)
    if normaliser == "grpo":
        # Below ε the spread is rounding, and dividing by it would make noise of one size with real advantages.
        spread = _deviation(rewards, centre)
        scale = spread + EPSILON
        return [0.0] * len(rewards) if spread < EPSILON else [(reward - centre) / scale for reward in rewards]
    # With n rewards, r less the mean of the others is (r - mean) n / (n - 1).
    factor = len(rewards) / (len(rewards) - 1) if normaliser == "rloo" else 1.0
    return [(reward - centre) * factor for reward in rewards]


def _centred_far(rewards: Sequence[float], largest: float, normaliser: Normaliser) -> Sequence[float]:
    """The same where differences of rewards may be beyond float64."""
    made = _centred([reward / largest for reward in rewards], normaliser)
    return made if normaliser == "grpo" else [bounded(advantage * largest) for advantage in made]


def num_rollouts(rollout_ids: Sequence[str], forks: Sequence[int]) -> int:
    """Of how many rollouts rows are: one for each main row, and one for the forks whose main row is not there.

    ``forks`` are 0 for main rows; forks have a rollout id.
    """
    mains = {rollout for rollout, fork in zip(rollout_ids, forks, strict=True) if not fork}
    orphans = {rollout for rollout, fork in zip(rollout_ids, forks, strict=True) if fork} - mains
    return forks.count(0) + len(orphans)


@dataclass(frozen=True, slots=True)
class Padding:
    """How rows are brought to a group's size."""

    group_size: int
    num_kept: int
    """Rollouts of which there are rows."""
    copies: Sequence[int]
    """How often each row is copied: forks never, unless there are only forks."""
    added: Sequence[int]
    """The places of the rows that are copied, in order."""

    @classmethod
    def of(cls, rollout_ids: Sequence[str], forks: Sequence[int], group_size: int) -> Self:
        """For rows with these columns; ``forks`` are 0 for main rows."""
        num_kept = num_rollouts(rollout_ids, forks)
        # Only forks are left where a user's filter took their main sample.
        mains = [place for place, fork in enumerate(forks) if not fork] or range(len(forks))
        added = [mains[n % len(mains)] for n in range(max(0, group_size - num_kept))] if mains else []
        counts = Counter(added)
        return cls(group_size, num_kept, [counts[place] for place in range(len(forks))], added)

    def shares(self, rewards: Sequence[T]) -> list[T | float]:
        """What is left of each reward when ``num_kept`` rows stand for ``group_size``, and it goes out with its copies.

        The sum over the padded rows is the sum over these, scaled by ``group_size / num_kept``. What is no number stays
        as it is.
        """
        if not rewards:  # the filter kept none, and the run demands none: there is nothing to divide by
            return []
        scale = self.group_size / self.num_kept
        return [
            bounded(reward * scale / (1 + num)) if is_number(reward) else reward
            for reward, num in zip(rewards, self.copies, strict=True)
        ]
