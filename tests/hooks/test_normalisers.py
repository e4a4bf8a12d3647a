"""How rewards become advantages: numbers worked out by hand, what holds for all, and the way a run's choice takes."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.group import Normaliser
from forebay.hooks import HookInput, HookRunner, defaults
from forebay.hooks.advantages import advantages
from forebay.hooks.contract import ContractChoice
from forebay.hooks.defaults import Defaults
from forebay.hooks.group_sequence import index_items, index_rows, process
from forebay.hooks.types import Sizes
from tests.kit import IDLE, ServerProcess, assert_error, make_sample, write_generator

NORMALISERS: list[Normaliser] = ["grpo", "rloo", "dr_grpo"]
KEEPS_ALL = "def filter_item(item, task_type):\n    return True\n"
"""Something of the user's, so that the whole pipeline runs in the hook host."""

normalisers = st.sampled_from(NORMALISERS)
rows = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["", "a", "b"])), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("normaliser", "rewards", "rollouts", "expected"),
    [
        ("grpo", [0.0, 1.0, 1.0, 1.0], "", [-math.sqrt(3), *[1 / math.sqrt(3)] * 3]),
        ("rloo", [0.0, 1.0, 1.0, 0.5], "", [-2.5 / 3, 0.5, 0.5, -0.5 / 3]),
        ("dr_grpo", [0.0, 1.0, 1.0, 0.5], "", [-0.625, 0.375, 0.375, -0.125]),
        ("grpo", [0.0, 1.0, 1.0, 1.0], ".aaa", [-1.0, 1.0, 1.0, 1.0]),
        ("rloo", [0.0, 1.0, 1.0, 0.5], "..bb", [-0.875, 0.625, 0.25, 0.25]),
        ("dr_grpo", [0.0, 0.5, 1.0], ".cc", [-0.375, 0.375, 0.375]),
        ("dr_grpo", [0.25, 0.75, 2.5], "", [-0.25, 0.25, 2.5]),
        ("rloo", [0.25, 0.75, 2.5, 0.75], ".ddd", [-0.5, 0.5, 2.5, 0.5]),
        ("rloo", [0.7], "", [0.0]),
        ("rloo", [0.2, 0.8], "aa", [0.0, 0.0]),
        ("dr_grpo", [0.1, 0.1, 0.1], "", [0.0, 0.0, 0.0]),
        ("grpo", [0.2, 0.8], "aa", [0.0, 0.0]),
        ("rloo", [], "", []),
    ],
)
def test_the_numbers_are_those_of_the_formulas(
    normaliser: Normaliser, rewards: list[float], rollouts: str, expected: list[float]
) -> None:
    ids = [letter.strip(".") for letter in rollouts]
    assert advantages(rewards, ids, normaliser) == pytest.approx(expected, abs=1e-7)


@given(group=rows, normaliser=normalisers)
def test_rollouts_balance_and_forks_share(group: list[tuple[float, str]], normaliser: Normaliser) -> None:
    made = advantages([reward for reward, _ in group], [told for _, told in group], normaliser)
    by_rollout: dict[object, set[object]] = {}
    for place, ((_, told), advantage) in enumerate(zip(group, made, strict=True)):
        by_rollout.setdefault(told or place, set()).add(advantage)
    assert all(len(values) == 1 for values in by_rollout.values())
    numbers = [float(str(value)) for values in by_rollout.values() for value in values]
    assert all(math.isfinite(number) for number in numbers)
    if any(reward for reward, _ in group):
        assert math.fsum(numbers) == pytest.approx(0, abs=1e-6)


@given(rewards=st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [math.fsum(rewards) - reward for reward in rewards]
    expected = [reward - rest / (len(rewards) - 1) for reward, rest in zip(rewards, others, strict=True)]
    assert advantages(rewards, [], "rloo") == pytest.approx(expected, abs=1e-9)


async def no_bodies() -> list[bytes]:
    raise AssertionError("the columns are enough")


def test_forks_are_neither_counted_nor_copied_when_a_group_is_padded() -> None:
    rewards, ids, forks = [1.0, 1.0, 0.0, 0.5], ["a", "a", "b", "c"], [0, 1, 0, 0]
    asked = HookInput(1, rewards, no_bodies, ids, forks)
    whole = defaults.process(asked, Sizes(3, 3, 3), "A", "dr_grpo")
    assert [(row.source, row.reward) for row in whole.rows] == [(0, 0.5), (1, 0.5), (2, -0.5), (3, 0.0)]
    padded = defaults.process(asked, Sizes(4, 3, 3), "A", "dr_grpo")
    assert [row.source for row in padded.rows] == [0, 1, 2, 3, 0], "the first main row is copied"
    assert sum(row.reward or 0.0 for row in padded.rows) == pytest.approx(0.5 * 4 / 3)
    short = defaults.process(asked, Sizes(5, 4, 4), "A", "dr_grpo")
    assert (short.is_filtered, short.num_kept) == (True, 3)


@given(
    group=st.lists(st.tuples(st.floats(-1, 2), st.sampled_from(["", "a", "b"]), st.integers(0, 2)), max_size=12),
    size=st.integers(1, 14),
    normaliser=normalisers,
    contract=st.sampled_from(["A", "B"]),
)
def test_columns_give_what_items_give(
    group: list[tuple[float, str, int]], size: int, normaliser: Normaliser, contract: Any
) -> None:
    rewards, ids = [reward for reward, _, _ in group], [told for _, told, _ in group]
    forks = [fork if told else 0 for _, told, fork in group]
    sizes = Sizes(size, max(1, size - 1), max(1, size // 2))
    hooks = Defaults(ContractChoice(contract), normaliser)
    outcome = process(hooks, (1, index_items(1, rewards, ids, forks)), sizes, contract)
    asked = HookInput(1, rewards, no_bodies, ids, forks)
    assert defaults.process(asked, sizes, contract, normaliser) == index_rows(outcome)
    verdict = defaults.judge(rewards, sizes, contract)
    whole = (1, index_items(1, rewards, ids))
    assert (verdict.is_valid, verdict.is_finished) == hooks.is_valid_group(whole, size, sizes.min_valid_group_size)


@pytest.mark.parametrize("source", ["", KEEPS_ALL])
async def test_the_hook_host_normalises_as_the_server_does(
    source: str,
    make_file: Callable[[str], Path],
    make_runner: Callable[..., AbstractAsyncContextManager[HookRunner]],
) -> None:
    rewards, ids = [0.0, 1.0, 1.0, 0.5], ["", "", "b", "b"]

    async def bodies() -> list[bytes]:
        samples = [make_sample(instance_id=7, reward=r, rollout_id=i) for r, i in zip(rewards, ids, strict=True)]
        return [json.dumps(sample).encode() for sample in samples]

    path = make_file(source) if source else None
    async with make_runner(path, normaliser="rloo") as runner:
        done = await runner.process(HookInput(7, rewards, bodies, ids), Sizes(4, 4, 2))
    assert [row.reward for row in done.rows] == pytest.approx([-0.875, 0.625, 0.25, 0.25], abs=1e-9)


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_run_normalises_as_it_was_told(has_hook: bool, server: ServerProcess) -> None:
    if has_hook:
        keeping = IDLE.replace('"idle"', '"keeps_all"') + KEEPS_ALL
        write_generator(server.generators, keeping, "keeps_all_generator.py")
    run = server.start_run("keeps_all" if has_hook else "idle", group_size=4, normaliser="rloo")
    told = [(0.0, None), (1.0, "main"), (1.0, 7), (0.5, 7)]
    run.write(*(make_sample(uid=f"u{n}", reward=r, rollout_id=rollout) for n, (r, rollout) in enumerate(told)))
    data = run.read(num_groups=1, wait_s=20)["data"]
    assert [row["reward"] for row in data] == pytest.approx([-0.875, 0.625, 0.25, 0.25], abs=1e-9)
    assert [row["raw_reward"] for row in data] == [0.0, 1.0, 1.0, 0.5]
    run.stop()


def test_an_unknown_normaliser_is_refused_with_the_names(server: ServerProcess) -> None:
    reply = server.client.post("/v1/runs", json={"task_type": "idle", "group_size": 4, "normaliser": "ppo"})
    error = assert_error(reply, 422, "invalid_input", "normaliser")
    assert all(name in error["message"] for name in NORMALISERS)
