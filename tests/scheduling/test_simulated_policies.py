"""What policies are worth, on three populations of answers; with twenty seeds in the benchmarks."""

from tests.scheduling.populations_kit import UNEQUAL, mean_ratio, mean_ratio_with_history

FEW = 2


def test_pulling_costs_nothing_on_equal_engines_and_saves_on_unequal_ones() -> None:
    assert mean_ratio("long", "pull", "static", FEW) <= 1.05
    assert mean_ratio("long", "pull", "static", FEW, UNEQUAL) <= 0.95


def test_long_answers_first_save_a_sixth_where_an_epoch_was_recorded() -> None:
    assert mean_ratio_with_history("long", "longest-first", "pull", FEW) <= 0.9
