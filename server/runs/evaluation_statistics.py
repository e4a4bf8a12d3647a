"""Statistics of an evaluation's rewards: mean, pass@k, and their 95 % intervals. Pure."""

from collections.abc import Mapping, Sequence
from math import comb, sqrt
from typing import Any

from forebay.core.ids import InstanceId

NORMAL_95 = 1.96
"""Standard errors on each side of the value within which 95 % of a normal distribution lie."""
PASSED = 1.0
"""Lowest reward of a rollout that passed."""

RewardsByInstance = Mapping[InstanceId, Sequence[float]]
"""The rewards of an evaluation's rollouts that count; at least one for each instance."""
Estimate = dict[str, float | None]
"""``value``, and the bounds ``low`` and ``high`` of its interval, which are None for a single instance."""


def estimates(rewards: RewardsByInstance, group_size: int) -> dict[str, Any]:
    """``mean``, None without a rollout, and ``pass_at``, by k: the powers of two up to ``group_size``, and itself."""
    ks = sorted({2**power for power in range(group_size.bit_length())} | {group_size})
    found = {str(k): pass_at(rewards, k) for k in ks}
    return {
        "mean": clustered(list(rewards.values())) if rewards else None,
        "pass_at": {k: estimate for k, estimate in found.items() if estimate is not None},
    }


def pass_at(rewards: RewardsByInstance, k: int) -> Estimate | None:
    """Chance that at least one of ``k`` rollouts passes, over the instances with ``k`` or more; None without any.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) for ``c`` of ``n`` that passed (Chen et al. 2021,
    arXiv:2107.03374, equation 1).
    """
    counts = [(len(each), sum(reward >= PASSED for reward in each)) for each in rewards.values()]
    rates = [1 - comb(n - c, k) / comb(n, k) for n, c in counts if n >= k]
    if not rates:
        return None
    estimate = clustered([[rate] for rate in rates])
    # The interval of a normal distribution knows no bounds; a probability does.
    return {name: value and min(1.0, max(0.0, value)) for name, value in estimate.items()}


def clustered(values: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all ``values``, with an interval that allows for values of one instance being alike.

    The standard error is clustered by instance (Miller 2024, arXiv:2411.00640, section 2.2), times
    sqrt(G / (G - 1)) for G instances.
    """
    num_instances, num_values = len(values), sum(map(len, values))
    mean = sum(map(sum, values)) / num_values
    if num_instances < 2:
        return {"value": mean, "low": None, "high": None}
    squares = sum(sum(value - mean for value in each) ** 2 for each in values)
    half = NORMAL_95 * sqrt(squares * num_instances / (num_instances - 1)) / num_values
    return {"value": mean, "low": mean - half, "high": mean + half}
