"""The built-in behaviour against slime's formulas, written out here a second time, and against every kind of input."""

import math
import statistics
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.hooks.contract import ContractChoice
from forebay.hooks.defaults import Defaults, meta_info

CLOSE = {"rel_tol": 1e-9, "abs_tol": 1e-9}
unit_rewards = st.lists(st.floats(0, 1), min_size=1, max_size=20)
any_rewards = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30)


@pytest.fixture
def hooks() -> Defaults:
    return Defaults(ContractChoice("A"))


def items_of(rewards: list[Any]) -> list[dict[str, Any]]:
    return [{"instance_id": 1, "reward": r, "messages": [], "n": n} for n, r in enumerate(rewards)]


def rewards_of(group: tuple[Any, list[dict[str, Any]]]) -> list[Any]:
    return [item["reward"] for item in group[1]]


def normalized(rewards: list[Any]) -> list[Any]:
    return rewards_of(Defaults(ContractChoice("A")).normalize_group_data((1, items_of(rewards))))


def padded(rewards: list[Any], group_size: int) -> list[dict[str, Any]]:
    return Defaults(ContractChoice("A")).pad_group_data((1, items_of(rewards)), group_size)[1]


def test_normalising_gives_z_scores_with_the_population_deviation() -> None:
    rewards = [0.0, 1.0, 1.0, 0.5]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert normalized(rewards) == pytest.approx([(r - mean) / (deviation + 1e-8) for r in rewards], abs=1e-12)


def test_normalising_keeps_the_reward_as_it_was(hooks: Defaults) -> None:
    _, items = hooks.normalize_group_data((1, items_of([0, 1])))
    assert [item["raw_reward"] for item in items] == [0, 1]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 0.0], [0, 0.0]),
        ([0.7, 0.7], [0.0, 0.0]),
        ([1.0], [0.0]),
        ([0.1 + 0.2, 0.3], [0.0, 0.0]),
        ([2.5, -1.0], [2.5, -1.0]),
        ([2.5, 0.0, 0.0], [2.5, 0.0, 0.0]),
        ([2.5, 0.5, 0.5], [2.5, 0.0, 0.0]),
        ([None, "x", 0.5], [None, "x", 0.0]),
        ([], []),
    ],
)
def test_normalising_without_spread_or_without_valid_rewards(rewards: list[Any], expected: list[Any]) -> None:
    assert normalized(rewards) == expected


def test_zero_spread_gives_zero_and_not_minus_zero() -> None:
    assert [math.copysign(1, reward) for reward in normalized([0.3, 0.1 + 0.2])] == [1, 1]


@given(unit_rewards)
def test_normalised_rewards_are_finite_and_sum_to_nearly_nothing(rewards: list[float]) -> None:
    scores = normalized(rewards)
    assert all(map(math.isfinite, scores))
    assert abs(math.fsum(scores)) <= 1e-6 * len(scores)


@pytest.mark.parametrize(("num_kept", "group_size"), [(6, 8), (8, 8), (3, 8), (1, 8), (1, 1), (2, 7)])
def test_padding_copies_from_the_first_row_on_cyclically(num_kept: int, group_size: int) -> None:
    rows = padded([1.0] * num_kept, group_size)
    expected = list(range(num_kept)) + [n % num_kept for n in range(group_size - num_kept)]
    assert [row["n"] for row in rows] == expected


def test_padding_halves_what_is_copied_once_as_slime_does() -> None:
    rewards = [0.3, -1.2, 0.9]
    scaled = [reward * 4 / 3 for reward in rewards]
    expected = [scaled[0] / 2, scaled[1], scaled[2], scaled[0] / 2]
    assert [row["reward"] for row in padded(rewards, 4)] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.integers(1, 24))
def test_padding_keeps_the_sum_scaled_and_shares_equally(rewards: list[float], group_size: int) -> None:
    rows = padded(rewards, group_size)
    assert len(rows) == max(group_size, len(rewards))
    total = math.fsum(row["reward"] for row in rows)
    assert math.isclose(total, math.fsum(rewards) * group_size / len(rewards), **CLOSE)
    for n in range(len(rewards)):
        assert len({row["reward"] for row in rows if row["n"] == n}) == 1


def test_padded_copies_share_nothing_with_their_original(hooks: Defaults) -> None:
    first, second = hooks.pad_group_data((1, items_of([1.0])), 2)[1]
    second["messages"].append("changed")
    assert first["messages"] == []


def test_padding_leaves_rewards_that_are_no_numbers_and_never_leaves_float64() -> None:
    assert [row["reward"] for row in padded([None], 2)] == [None, None]
    assert all(math.isfinite(row["reward"]) for row in padded([1.5e308, -1.5e308, 1.0], 4))
    assert padded([], 4) == []


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"reward": 0}, True),
        ({"reward": 1.0000001}, False),
        ({"reward": -0.1}, False),
        ({"reward": "1"}, False),
        ({"reward": None}, False),
        ({"reward": True}, True),
        ({"messages": "text"}, False),
    ],
)
def test_filter_keeps_numeric_rewards_within_zero_and_one(
    hooks: Defaults, change: dict[str, Any], is_kept: bool
) -> None:
    item = {"instance_id": 1, "reward": 0.5, "messages": []}
    assert hooks.filter_item(item | change) is is_kept


@pytest.mark.parametrize("field", ["instance_id", "reward", "messages"])
def test_filter_drops_an_item_that_lacks_a_field(hooks: Defaults, field: str) -> None:
    item = {"instance_id": 1, "reward": 0.5, "messages": []}
    del item[field]
    assert not hooks.filter_item(item)


@pytest.mark.parametrize(
    ("contract", "rewards", "expected"),
    [
        ("A", [0.0, 1.0, 0.0], (True, True)),
        ("A", [0.0, 1.0], (False, False)),
        ("A", [1.0, 1.0, 1.0], (False, False)),
        ("A", [], (False, False)),
        ("B", [1.0, 1.0, 1.0], (False, False)),
        ("B", [1.0, 1.0, 1.0, 1.0], (True, True)),
    ],
)
def test_default_validity(contract: Any, rewards: list[float], expected: tuple[bool, bool]) -> None:
    assert Defaults(ContractChoice(contract)).is_valid_group((1, items_of(rewards)), 4, 3) == expected


def test_meta_info_of_nothing_is_zeros(hooks: Defaults) -> None:
    assert set(hooks.get_group_data_meta_info({}).values()) == {0}


@given(any_rewards)
def test_meta_info_is_finite_whatever_the_rewards(rewards: list[float]) -> None:
    told = meta_info(1, len(rewards), rewards)
    assert all(math.isfinite(value) for value in told.values())
    assert told["reward_min"] <= told["reward_max"]


def test_meta_info_survives_the_ends_of_float64() -> None:
    told = meta_info(1, 4, [sys.float_info.max, sys.float_info.max, -sys.float_info.max, sys.float_info.max])
    assert told["avg_reward"] == pytest.approx(sys.float_info.max / 2)
