"""Group arithmetic that is safe for every input: no values, one value, no spread, values near the end of float64."""

import math
import sys
from collections.abc import Sequence
from typing import TypeGuard

EPSILON = 1e-8
"""Added to a deviation before dividing by it; a smaller deviation counts as none."""

_LARGEST = sys.float_info.max


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number; a bool is none."""
    return _is_real(value) and -_LARGEST <= value <= _LARGEST


def is_valid_reward(value: object) -> bool:
    """Whether ``value`` is a number within [0, 1]."""
    return _is_real(value) and 0 <= value <= 1


def _is_real(value: object) -> TypeGuard[float]:
    return type(value) is float or (isinstance(value, (int, float)) and not isinstance(value, bool))


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
    if not values:
        return 0.0
    centre = mean(values)
    return bounded(math.hypot(*[value - centre for value in values]) / math.sqrt(len(values)))


def z_scores(rewards: Sequence[object]) -> list[object]:
    """Each valid reward minus their mean, over their population deviation plus ε; what is not valid stays as it is.

    Rewards that are all zero stay zero, rewards without spread become zero (GRPO, arXiv:2402.03300, as in slime).
    """
    valid = [reward if _is_real(reward) and 0 <= reward <= 1 else None for reward in rewards]
    numbers = [reward for reward in valid if reward is not None]
    if not any(numbers):
        return list(rewards)
    centre, spread = mean(numbers), deviation(numbers)
    if spread < EPSILON:
        return [raw if reward is None else 0.0 for raw, reward in zip(rewards, valid, strict=True)]
    scale = spread + EPSILON
    return [raw if reward is None else (reward - centre) / scale for raw, reward in zip(rewards, valid, strict=True)]


def num_copies(num_kept: int, group_size: int) -> list[int]:
    """How often each of ``num_kept`` ≥ 1 rows is copied to reach ``group_size``: cyclically, from the first."""
    every, first = divmod(max(0, group_size - num_kept), num_kept)
    return [every + (index < first) for index in range(num_kept)]
