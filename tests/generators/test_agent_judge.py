"""Verifiers: commands that tell a reward, and those that do not."""

from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.generators.agents.verifier import Verifier
from forebay.generators.failures import JudgeFailed
from forebay.generators.rewards import Reward, checked
from forebay.generators.sandbox import Limits, Sandbox


async def reward(command: str, **how: Any) -> Reward:
    async with Sandbox() as sandbox:
        return await Verifier(command, **how).reward(sandbox, {"label": 7})


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("echo 0.5", 0.5),
        ('echo note; echo \'{"reward": 2, "why": "all"}\'; echo', 2.0),
        ("cat | tail -c 2 | head -c 1", 7.0),
        ("echo true", 1.0),
    ],
)
async def test_the_last_line_tells_the_reward(command, told) -> None:
    assert checked(await reward(command)).reward == told


async def test_other_numbers_of_the_last_line_are_parts_of_the_reward() -> None:
    told = """{"tests": 0.5, "reward": 0.7, "built": true, "tests passed": 3, "why": "one failed"}"""
    outcome = checked(await reward(f"echo '{told}'"))
    assert (outcome.reward, outcome.parts) == (0.7, {"tests": 0.5, "built": 1.0})


@pytest.mark.parametrize(
    "command", ["", "echo 1; exit 1", "echo yes", "echo '{}'", "echo '[1]'", "echo NaN", "kill -9 $$"]
)
async def test_what_tells_no_reward_is_a_failure_of_the_judge(command) -> None:
    with pytest.raises(JudgeFailed, match="the verifier"):
        await reward(command)


@pytest.mark.parametrize(("command", "told"), [("exit 0", 1.0), ("exit 1", 0.0)])
async def test_a_status_may_tell_the_reward(command, told) -> None:
    assert await reward(command, reads="exit_status") == told


@pytest.mark.parametrize("command", ["exit 2", "kill -9 $$", "sleep 1000"])
async def test_other_statuses_are_failures_of_the_judge(command) -> None:
    with pytest.raises(JudgeFailed, match="the verifier"):
        await reward(command, reads="exit_status", limits=Limits(wall_s=0.3))


async def test_a_verifier_that_is_not_there_is_told() -> None:
    async with Sandbox() as sandbox:
        with pytest.raises(InvalidInput, match="cannot be started"):
            await Verifier(["/no/such/verifier"]).reward(sandbox, {})
