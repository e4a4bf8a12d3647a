"""What policies are worth on three populations, as means over twenty seeds."""

import pytest

from tests.benchmarks.machines import show
from tests.scheduling.populations_kit import UNEQUAL, mean_ratio, mean_ratio_with_history

pytestmark = pytest.mark.bench

NUM_SEEDS = 20
NAMES = ("short", "probe", "long")


def test_pull_against_static() -> None:
    equal = {name: mean_ratio(name, "pull", "static", NUM_SEEDS) for name in NAMES}
    unequal = {name: mean_ratio(name, "pull", "static", NUM_SEEDS, UNEQUAL) for name in NAMES}
    rows = [(name, equal[name], unequal[name], "1.03, 0.9") for name in NAMES]
    show("Makespan of pull as a share of that of static", ("", "equal engines", "speeds 1:2", "target"), rows)
    assert max(equal.values()) <= 1.03
    assert max(unequal.values()) <= 0.9


def test_longest_first_against_pull() -> None:
    ratios = {name: mean_ratio_with_history(name, "longest-first", "pull", NUM_SEEDS) for name in NAMES}
    rows = [(name, ratio, 0.85 if name == "long" else 1.02) for name, ratio in ratios.items()]
    show("Makespan of longest-first, after one epoch, as a share of that of pull", ("", "ratio", "target"), rows)
    assert ratios["long"] <= 0.85
    assert max(ratios["short"], ratios["probe"]) <= 1.02
