"""``forebay compare --reward`` judges rollouts as a replay with ``rewards: "again"`` does, forks and lost parts too."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.errors import InvalidInput
from forebay.generators.rewards import Rewarder
from forebay.replay.source import Recorded
from forebay.server.cli.compare.new_rewards import NewRewards, open_rewarder
from tests.replay.recordings.recording_kit import group_record, run_record, sample_record


def recorded(slot: int, fields: dict[str, Any], **columns: Any) -> Recorded:
    columns = {"rollout_id": f"rollout-{slot}", "uid": f"uid-{slot}-{columns.get('fork', 0)}", **columns}
    body = {"messages": [{"role": "assistant", "content": "8"}], "extra_info": {"finish_reason": "stop"}, **fields}
    return sample_record(group_record(1), slot, **columns), msgspec.json.encode(body)


async def test_what_its_function_was_given_then_it_is_given_now_or_it_is_not_asked() -> None:
    asked: list[tuple[str, object, object]] = []

    async def judge(item: dict[str, Any]) -> float:
        asked.append((item["uid"], item.get("answer"), item.get("level")))
        return 0.75

    group = [
        recorded(0, {"reward": 1, "for_reward": {"answer": 8}}, fork=1),
        recorded(0, {"reward": 1, "raw_reward": 1, "for_reward": {"answer": 8}, "extra_info": {"level": 3}}),
        recorded(1, {"reward": 1}, fork=1),
        recorded(1, {"reward": 1, "for_reward": None}),  # more than 64 KiB
        recorded(2, {"reward": 1, "extra_info": {"agent": {"steps": 4}}}),  # of before samples had `for_reward`
        recorded(3, {"error": "no", "status": "failed", "extra_info": {"finish_reason": "length"}},
                 reward=None, rollout_outcome="judge_failure"),
        recorded(4, {"error": "no", "status": "failed"}, reward=None, rollout_outcome="engine_failure"),
        recorded(5, {"reward": 1, "extra_info": {"agent": "theirs"}}, is_foreign=True),
    ]  # fmt: skip
    async with Rewarder(judge, timeout_s=60, num_workers=1) as rewarder:
        rewards = NewRewards(rewarder)
        changed = await rewards.change(group)
    assert sorted(asked, key=lambda each: each[0]) == [
        ("uid-0-0", 8, 3), ("uid-3-0", None, None), ("uid-5-0", None, None)
    ]  # fmt: skip
    # The fork of a rollout that nobody can judge goes with it.
    assert {record.uid: record.reward for record, _ in changed} == {
        "uid-0-1": 0.75, "uid-0-0": 0.75, "uid-1-0": None, "uid-2-0": None, "uid-3-0": 0.75, "uid-4-0": None,
        "uid-5-0": 0.75,
    }  # fmt: skip
    bodies = {record.uid: msgspec.json.decode(body) for record, body in changed}
    assert [bodies["uid-0-0"][name] for name in ("reward", "raw_reward")] == [0.75, 0.75]
    assert [bodies["uid-3-0"].get(name) for name in ("outcome", "status", "error")] == ["truncated", "completed", None]
    assert {record.rollout_outcome for record, _ in changed if record.slot in (1, 2)} == {"judge_failure"}
    assert rewards.facts() == (
        "5 rollouts were judged again, 1 had failed before; 2 have none now, and count as failed: "
        "2 not_recorded: the input of its reward function was not recorded"
    )


def test_a_verifier_that_needs_the_folder_of_its_agent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def look(item):\n    return 1.0\nlook.needs_folder = True\n")
    with pytest.raises(InvalidInput, match="reads the agent's folder"):
        open_rewarder(f"{tmp_path / 'judge.py'}:look", run_record())
