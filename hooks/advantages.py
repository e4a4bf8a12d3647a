"""Group arithmetic that handles every input: no values, one value, no spread, values near the limits of float64."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeGuard, TypeVar

from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange

EPSILON = 1e-8
"""Added to a deviation before dividing by it. A smaller deviation counts as zero."""

_LARGEST = sys.float_info.max
_SAFE = 1e300
"""For rewards up to this size, differences and deviations are within float64."""

T = TypeVar("T")


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number; true and false count as 1 and 0."""
    # Comparisons also exclude NaN, and integers beyond float64, for which ``math.isfinite`` raises.
    return _is_real(value) and -_LARGEST <= value <= _LARGEST


def is_valid_reward(value: object, reward_range: RewardRange | None) -> TypeGuard[float]:
    """Whether ``value`` is a number within ``reward_range``; without a range, whether it is a finite number."""
    if reward_range is None:
        return is_number(value)
    return _is_real(value) and reward_range[0] <= value <= reward_range[1]


def _is_real(value: object) -> TypeGuard[float]:
    # The exact type is tested first for speed, because almost every reward has it.
    return type(value) is float or isinstance(value, (int, float))


def bounded(value: float) -> float:
    """Return ``value``, or the nearest finite float64 if it is infinite."""
    return max(-_LARGEST, min(_LARGEST, value))


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 for no values."""
    if not values:
        return 0.0
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond float64, the mean is not
        return bounded(2 * math.fsum(value / len(values) / 2 for value in values))


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation; 0 for no values."""
    return _deviation(values, mean(values)) if values else 0.0


def _deviation(values: Sequence[float], centre: float) -> float:
    # A plain sum of squares could overflow or underflow although the deviation itself does not.
    return bounded(math.hypot(*[value - centre for value in values]) / math.sqrt(len(values)))


def advantages(
    rewards: Sequence[object],
    rollout_ids: Sequence[str],
    normaliser: Normaliser,
    reward_range: RewardRange | None = SLIME_REWARD_RANGE,
) -> list[object]:
    """Return the advantage of each valid reward within its group. Invalid rewards stay unchanged and do not count.

    With r the rewards of n rollouts, m their mean and s their population deviation:

    - "grpo": (r - m) / (s + ε) (GRPO, arXiv:2402.03300, as in slime)
    - "rloo": r - mean of the other rollouts' rewards (RLOO, arXiv:2402.14740)
    - "dr_grpo": r - m (Dr. GRPO, arXiv:2503.20783)

    Rewards that share a rollout id other than "" belong to one rollout: their mean is one r, and all get its advantage.
    Without any ids, each reward is its own rollout. Rewards that are all zero stay zero, and rewards without spread
    become zero.
    """
    valid = [place for place, reward in enumerate(rewards) if is_valid_reward(reward, reward_range)]
    numbers = [reward for reward in rewards if is_valid_reward(reward, reward_range)]
    kept_ids = [rollout_ids[place] for place in valid] if rollout_ids else ()
    made = list(rewards)
    for place, advantage in zip(valid, valid_advantages(numbers, kept_ids, normaliser), strict=True):
        made[place] = advantage
    return made


def valid_advantages(rewards: Sequence[float], rollout_ids: Sequence[str], normaliser: Normaliser) -> Sequence[float]:
    """Return the advantage of each reward like ``advantages``, if every reward is valid."""
    if not any(rewards):
        return rewards
    if not any(rollout_ids):
        return _centred(rewards, normaliser)
    # A row without an id is its own rollout, keyed by its index, an int that cannot equal an id.
    keys: list[object] = [rollout or place for place, rollout in enumerate(rollout_ids)]
    forks: dict[object, list[float]] = {}
    for key, reward in zip(keys, rewards, strict=True):
        forks.setdefault(key, []).append(reward)
    # Equal rewards are not averaged: the mean of equal numbers may differ in its last digit.
    common = [group[0] if min(group) == max(group) else mean(group) for group in forks.values()]
    made = dict(zip(forks, _centred(common, normaliser), strict=True))
    return [made[key] for key in keys]


def _centred(rewards: Sequence[float], normaliser: Normaliser) -> Sequence[float]:
    """Return one advantage per rollout's reward."""
    low, high = min(rewards), max(rewards)
    if low == high:  # also for a single reward; the mean of equal numbers may differ in its last digit
        return [0.0] * len(rewards)
    if max(-low, high) > _SAFE:
        return _centred_far(rewards, max(-low, high), normaliser)
    centre = mean(rewards)
    if normaliser == "grpo":
        # A spread below ε is rounding error, which a division would scale up to the size of real advantages.
        spread = _deviation(rewards, centre)
        scale = spread + EPSILON
        return [0.0] * len(rewards) if spread < EPSILON else [(reward - centre) / scale for reward in rewards]
    # With n rewards, r minus the mean of the others is (r - mean) n / (n - 1).
    factor = len(rewards) / (len(rewards) - 1) if normaliser == "rloo" else 1.0
    return [(reward - centre) * factor for reward in rewards]


def _centred_far(rewards: Sequence[float], largest: float, normaliser: Normaliser) -> Sequence[float]:
    """Return the advantages of rewards whose differences may be beyond float64."""
    made = _centred([reward / largest for reward in rewards], normaliser)
    return made if normaliser == "grpo" else [bounded(advantage * largest) for advantage in made]


def num_rollouts(rollout_ids: Sequence[str], forks: Sequence[int]) -> int:
    """Count the rollouts of rows: one per main row, and one per rollout that has only forks.

    ``forks`` is 0 for main rows. Forks always have a rollout id.
    """
    mains = {rollout for rollout, fork in zip(rollout_ids, forks, strict=True) if not fork}
    orphans = {rollout for rollout, fork in zip(rollout_ids, forks, strict=True) if fork} - mains
    return forks.count(0) + len(orphans)


@dataclass(frozen=True, slots=True)
class Padding:
    """How rows are padded to a group's size."""

    group_size: int
    num_kept: int
    """Number of rollouts with rows."""
    copies: Sequence[int]
    """Number of copies of each row. Forks are never copied, unless there are only forks."""
    added: Sequence[int]
    """Indices of the copied rows, in order."""

    @classmethod
    def of(cls, rollout_ids: Sequence[str], forks: Sequence[int], group_size: int) -> Self:
        """Compute the padding of rows with these columns; ``forks`` is 0 for main rows."""
        num_kept = num_rollouts(rollout_ids, forks)
        # Only forks are left if a user's filter removed their main sample.
        mains = [place for place, fork in enumerate(forks) if not fork] or range(len(forks))
        added = [mains[n % len(mains)] for n in range(max(0, group_size - num_kept))] if mains else []
        counts = Counter(added)
        return cls(group_size, num_kept, [counts[place] for place in range(len(forks))], added)

    def shares(self, rewards: Sequence[T]) -> list[T | float]:
        """Scale each reward by ``group_size / num_kept`` and divide it between a row and its copies.

        The sum over the padded rows is therefore the scaled sum over the given rows. Values that are not numbers stay
        unchanged.
        """
        if not rewards:  # the filter kept none, and the run requires none: avoid a division by zero
            return []
        scale = self.group_size / self.num_kept
        return [
            bounded(reward * scale / (1 + num)) if is_number(reward) else reward
            for reward, num in zip(rewards, self.copies, strict=True)
        ]
