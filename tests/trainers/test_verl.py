"""verl's own trainer on runs of Forebay."""

import json
import math
import signal
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from forebay.client.verl.config import check_sampler
from forebay.core.errors import InvalidInput
from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_sample, run_ids, write_generator
from tests.trainers.conftest import RunScript

pytestmark = pytest.mark.trainers

N = 3
"""Samples of a group, as in ``verl_training.py``; its steps have two samples of two groups."""
ONE_TURN, TWO_TURNS, CUT = [0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1]
DIGITS = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "digits"
def reward_func(item):
    return int(item["messages"][-1]["content"]) / 2
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward_func, data["num_epoch"])
"""


def to_verl(server: ServerProcess, **given: Any) -> list[str]:
    given = {"url": server.url, **given}
    return [f"+trainer.v1.sampler.sampler_kwargs.{name}={value}" for name, value in given.items()]


def sample(
    group: str, slot: int, reward: float | None, mask: Sequence[int], logprob: float = -0.5, **changes: Any
) -> Json:
    """A sample with tokens of its own, of which each trained one has ``logprob``. Without a reward, it failed."""
    uids = {"uid": f"{group}/{slot}", "instance_id": group, "rollout_id": f"{group}-{slot}"}
    identity = {**uids, "epoch": 0, "slot": slot}
    if reward is None:
        error = {"type": "E", "message": "m"}
        return make_sample(**{**identity, "status": "failed", "error": error, "reward": ..., **changes})
    first = 100 * (sum(map(ord, group)) % 50) + 20 * slot
    arrays = {
        "tokens": list(range(first, first + len(mask))),
        "loss_mask": list(mask),
        "logprobs": [logprob if trained else None for trained in mask],
    }
    return make_sample(**{**identity, **arrays, "reward": reward, "reward_parts": {"half": reward / 2}, **changes})


def stored_groups() -> list[list[Json]]:
    """Groups of many shapes, in the order in which they are read; the first five are for step 1."""
    rewards = [0.0, 0.5, 1.0]
    fork = sample("forked", 1, 0.5, CUT, fork=1, uid="forked/1/fork", tokens=[7, 8, 9, 10])
    forked = [sample("forked", slot, reward, TWO_TURNS) for slot, reward in enumerate(rewards)]
    return [
        [sample("turns", slot, reward, TWO_TURNS, weight_version=0) for slot, reward in enumerate(rewards)],
        [forked[0], fork, *forked[1:]],
        [sample("failed", slot, reward, ONE_TURN) for slot, reward in enumerate([0.0, 1.0, None])],
        [sample("bare", slot, reward, CUT, logprobs=...) for slot, reward in enumerate(rewards)],
        [sample("cut", slot, reward, CUT, outcome="truncated") for slot, reward in enumerate(rewards)],
        *[[sample(f"off{n}", slot, rewards[slot], ONE_TURN, -0.6) for slot in range(N)] for n in range(4)],
    ]


def test_verl_trains_on_exactly_the_rows_that_are_stored(
    run_script: RunScript, server: ServerProcess, tmp_path: Path
) -> None:
    run = server.start_run(name="exact", group_size=N)
    for group in stored_groups():
        run.write(*group)
    wrong = {
        "trainer.v1.trainer_mode=sync": "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.trainer_mode=colocate_async": "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.sampler.max_off_policy_strategy=wait": "max_off_policy_strategy=drop",
        "trainer.v1.sampler.sampler_kwargs.task_type=null": "+trainer.v1.sampler.sampler_kwargs.task_type=my_task",
        "actor_rollout_ref.hybrid_engine=True": "actor_rollout_ref.hybrid_engine=False",
        "trainer.v1.sampler.custom_sampler.path=null": "custom_sampler.path=pkg://forebay.client.verl",
        "trainer.nnodes=1": "agent_loop_manager_class=forebay.client.verl.AgentLoopManager",  # no prompts came before
    }
    told = run_script(
        "verl_training.py",
        folder=str(tmp_path),
        engines=["127.0.0.1:1"],
        overrides=[*to_verl(server, name="exact", task_type="idle"), "trainer.total_training_steps=2"],
        refused=list(wrong),
    )
    for refusal, line in zip(told["refusals"], wrong.values(), strict=True):
        assert line in refusal
    assert told["validated"][1] == [f"{told['validated'][0][0]}_0_0"]

    stored = {each["uid"]: each for group in stored_groups() for each in group if "tokens" in each}
    expected = {uid: each for uid, each in stored.items() if each["instance_id"] != "bare"}
    assert sorted(told["model"]) == sorted(expected)
    for _, tag, row in told["seen"]:
        as_stored(row, expected)
        assert tag["min_global_steps"] == tag["max_global_steps"] == tag["global_steps"] - 1
    sessions = {row["extra_fields"]["sample_uid"]: key.partition("_")[2] for key, _, row in told["seen"]}
    assert (sessions["forked/1/fork"], sessions["forked/1"], sessions["forked/2"]) == ("1_0", "1_1", "2_0")

    on_policy, shifted = told["log"]
    assert [math.exp(-log["actor/ppo_kl"]) for log in (on_policy, shifted)] == pytest.approx([1.0, math.exp(0.1)])
    assert on_policy["critic/score/mean"] == pytest.approx(
        fmean(each["reward"] for uid, each in expected.items() if not uid.startswith("off"))
    )
    assert (on_policy["forebay/unusable_groups"] > 0, shifted["forebay/unusable_groups"]) == (True, 0)
    assert shifted["training/off_policy/trajectory_staleness/max"] == 0
    assert shifted["forebay/reward/mean"] == pytest.approx(0.5)
    view = run.view()
    assert {state: num for state, num in view["groups"].items() if num} == {"acked": len(stored_groups())}
    assert (view["weight_version"], view["settings"]["max_staleness"]) == (1, 7)
    assert not any(told["left"].values())


def as_stored(row: Json, expected: dict[str, Json]) -> None:
    """A row of verl's batch, which has verl's advantage by now, is that of the buffer."""
    sample = expected[row["extra_fields"]["sample_uid"]]
    assert row["extra_fields"]["reward_extra_info"] == {"half": sample["reward"] / 2}
    prompt = sample["loss_mask"].index(1)
    assert row["prompts"] + row["responses"] == row["input_ids"] == sample["tokens"]
    assert len(row["prompts"]) == prompt
    assert row["response_mask"] == row["loss_mask"] == sample["loss_mask"][prompt:]
    assert row["old_log_probs"] == pytest.approx([value or 0.0 for value in sample["logprobs"][prompt:]])
    assert row["old_log_probs"] == row["rollout_log_probs"]
    # A session counts once, with all its forks; a failed slot not at all.
    group = [each for each in expected.values() if each["instance_id"] == sample["instance_id"]]
    rewards = [each["reward"] for each in group if "fork" not in each]
    advantage = (sample["reward"] - fmean(rewards)) / (stdev(rewards) + 1e-6)
    assert row["advantages"] == pytest.approx([advantage * trained for trained in row["response_mask"]], abs=1e-4)


def test_a_verl_whose_trainer_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.client.verl.config.version", lambda _: "0.8.3")
    with pytest.raises(InvalidInput, match=r"verl 0\.8\.3 is too old: pip install 'verl>=0\.9\.1'"):
        check_sampler("separate_async", "drop", {"task_type": "digits"})


def test_a_killed_training_resumes_on_other_engines_with_every_group_once(
    run_script: RunScript, make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(generators=write_generator(tmp_path / "tasks", DIGITS, "digits_generator.py").parent)
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"instance_id": n, "prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(8)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digits = cycle("012")
    steps = ["trainer.total_training_steps=4", "trainer.save_freq=2"]
    given = {"folder": str(tmp_path), "overrides": [*to_verl(server, task_type="digits", input_file=tasks), *steps]}
    with (
        ScriptedEngine(lambda _: next(digits)).in_thread() as first,
        ScriptedEngine(lambda _: next(digits)).in_thread() as second,
    ):
        engines = [[engine.url.removeprefix("http://")] for engine in (first, second)]
        run_script("verl_training.py", **given, engines=engines[0], kill_at=4, killed_by=signal.SIGKILL)
        assert (tmp_path / "models" / "latest_checkpointed_iteration.txt").read_text() == "2"
        told = run_script("verl_training.py", **given, engines=engines[1])
        [run_id] = run_ids(server)
        run = NativeRun(server, run_id)
        assert run.view()["engine_urls"] == [second.url]
        delivered = [run.group(group["group_id"]) for group in run.groups(state="acked")]
        assert sorted(told["model"]) == sorted(each["uid"] for group in delivered for each in group["samples"])
        assert len(set(told["model"])) == len(told["model"]) == 4 * 4 * N
        assert [log["training/global_step"] for log in told["log"]][-2:] == [3, 4]
        assert {tag["global_steps"] for _, tag, _ in told["seen"]} == {3, 4}
        assert not any(told["left"].values())  # not even the rows that verl restored
