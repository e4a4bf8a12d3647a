"""Means, pass@k and their intervals, compared with other ways to compute them."""

from itertools import combinations
from statistics import fmean, stdev

import pytest

from forebay.server.runs.evaluation_statistics import clustered, estimates, pass_at


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets_of_k(k: int) -> None:
    rewards = {"a": [1.0, 0.0, 1.0, 0.0, 0.5], "b": [0.0] * 5, "c": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]}
    expected = fmean(fmean(max(subset) >= 1.0 for subset in combinations(each, k)) for each in rewards.values())
    found = pass_at(rewards, k)
    assert found is not None
    assert found["value"] == pytest.approx(expected)


def test_instances_with_fewer_rollouts_than_k_are_left_out() -> None:
    assert pass_at({"a": [1.0], "b": [0.0, 1.0]}, 2) == {"value": 1.0, "low": None, "high": None}
    assert list(estimates({"a": [1.0]}, 6)["pass_at"]) == ["1"]
    assert estimates({}, 4) == {"mean": None, "pass_at": {}}


def test_the_interval_counts_instances_and_not_their_rollouts() -> None:
    values = [0.1, 0.4, 0.9]
    half = 1.96 * stdev(values) / len(values) ** 0.5
    for num_rollouts in (1, 8):
        found = clustered([[value] * num_rollouts for value in values])
        assert found["low"] == pytest.approx(fmean(values) - half)
        assert found["high"] == pytest.approx(fmean(values) + half)
