"""Reward functions: where they run, and what becomes of those that fail."""

import asyncio
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.core.errors import InvalidInput
from forebay.generators.rewards import Rewarder

SOURCE = """
    import os, sys, time

    def pid(item): return os.getpid()
    def double(item): return item["x"] * 2
    def broken(item): return 1 / item["x"]
    def leave(item): sys.exit(3)
    def die(item): os._exit(3) if item["x"] == 0 else None; return 1
    def hang(item):
        while item["x"] == 0: pass
        return 1
    def say(item): return item["x"]

    class Scored:
        def __init__(self, scale): self.scale = scale
        def score(self, item): return item["x"] * self.scale
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of reward functions, importable by name as a run's own code is."""
    (tmp_path / "reward_functions.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    import reward_functions

    yield reward_functions
    del sys.modules["reward_functions"]


async def ask(function: Any, *items: dict[str, Any], timeout_s: float = 20.0) -> list[Any]:
    async with asyncio.timeout(60), Rewarder(function, timeout_s=timeout_s, num_workers=1) as rewarder:
        return [await rewarder.reward(item) for item in items]


async def test_a_function_runs_in_another_process_that_ends_with_the_rewarder(functions) -> None:
    first, second = await ask(functions.pid, {}, {})
    assert first.reward == second.reward != os.getpid()
    assert not psutil.pid_exists(int(first.reward))


async def test_a_bound_method_may_be_a_reward_function(functions) -> None:
    (outcome,) = await ask(functions.Scored(3).score, {"x": 2})
    assert outcome.reward == 6.0


async def test_what_a_function_raises_is_told_with_its_traceback(functions) -> None:
    bad, good = await ask(functions.broken, {"x": 0}, {"x": 2})
    assert (bad.reward, bad.kind) == (None, "ZeroDivisionError")
    assert "in broken" in bad.traceback
    assert good.reward == 0.5


async def test_a_function_that_hangs_is_killed_and_its_process_replaced(functions) -> None:
    bad, good = await ask(functions.hang, {"x": 0}, {"x": 1}, timeout_s=5.0)
    assert bad.kind == "reward_timeout"
    assert "longer than 5 s" in bad.message
    assert good.reward == 1.0


async def test_a_process_that_dies_is_replaced(functions) -> None:
    bad, good = await ask(functions.die, {"x": 0}, {"x": 1})
    assert bad.kind == "reward_crashed"
    assert good.reward == 1.0


async def test_sys_exit_costs_one_sample(functions) -> None:
    (outcome,) = await ask(functions.leave, {})
    assert outcome.kind == "SystemExit"


async def test_only_finite_numbers_are_rewards(functions) -> None:
    values = [float("nan"), float("inf"), None, "1", [1], 10**400, True, 3]
    outcomes = await ask(functions.say, *({"x": value} for value in values))
    assert [outcome.kind for outcome in outcomes[:6]] == ["invalid_reward"] * 6
    assert [outcome.reward for outcome in outcomes[6:]] == [1.0, 3.0]


async def test_a_mapping_has_the_total_and_named_parts(functions) -> None:
    given = {"reward": 0.7, "exact": True, "format": 0.4}
    (outcome,) = await ask(functions.say, {"x": given})
    assert (outcome.reward, outcome.parts) == (0.7, {"exact": 1.0, "format": 0.4})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"exact": 1.0, "score": 0.5}, "as 'reward' .*'exact', 'score'"),
        ({"reward": None, "exact": 1.0}, "finite number .*None"),
        ({"reward": float("inf"), "exact": 1.0}, "finite number .*inf"),
        ({"reward": 1.0, "exact": float("nan")}, "part 'exact' .*nan"),
        ({"reward": 1.0, "exact": "yes"}, "part 'exact' .*'yes'"),
        ({"reward": 1.0, "a b": 1.0}, "name .*'a b'"),
        ({"reward": 1.0, "": 1.0}, "name .*''"),
        ({"reward": 1.0, 7: 1.0}, "name .*7"),
        ({"reward": 1.0, **{f"test_{n}": 1.0 for n in range(65)}}, "at most 64 parts .*65"),
    ],
)
async def test_a_mapping_that_is_no_reward_is_told_and_is_never_0(functions, given, told) -> None:
    (outcome,) = await ask(functions.say, {"x": given})
    assert (outcome.reward, outcome.kind, outcome.parts) == (None, "invalid_reward", {})
    assert re.search(told, outcome.message)


def test_a_function_that_cannot_be_sent_to_a_process_is_told_with_the_remedy() -> None:
    def inner(item: dict[str, Any]) -> float:
        return 1.0

    for function in (inner, lambda _: 1.0):
        with pytest.raises(InvalidInput, match="cannot be sent to the process") as refused:
            Rewarder(function, timeout_s=1, num_workers=1)
        assert "top level of a module" in refused.value.hint


async def test_an_async_function_is_awaited_here_with_the_same_limit() -> None:
    async def reward(item: dict[str, Any]) -> Any:
        if item["x"] == "hang":
            await asyncio.Event().wait()
        if item["x"] == "raise":
            raise TimeoutError("its own")
        return item["x"]

    (hung,) = await ask(reward, {"x": "hang"}, timeout_s=0.2)
    raised, wrong, good = await ask(reward, {"x": "raise"}, {"x": float("nan")}, {"x": 2})
    assert (hung.kind, raised.kind, wrong.kind) == ("reward_timeout", "TimeoutError", "invalid_reward")
    assert "its own" in raised.traceback
    assert good.reward == 2.0


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit], ids=lambda error: error.__name__)
async def test_whatever_an_async_function_raises_costs_one_sample(error: type[BaseException]) -> None:
    async def reward(item: dict[str, Any]) -> float:
        raise error

    (outcome,) = await ask(reward, {})
    assert outcome.kind == error.__name__


async def test_a_cancelled_caller_leaves_the_process_to_the_next(functions) -> None:
    async with asyncio.timeout(60), Rewarder(functions.double, timeout_s=20, num_workers=1) as rewarder:
        asked = asyncio.create_task(rewarder.reward({"x": 1}))
        await asyncio.wait({asked}, timeout=0.01)
        asked.cancel()
        outcome = await rewarder.reward({"x": 4})
    assert outcome.reward == 8.0
