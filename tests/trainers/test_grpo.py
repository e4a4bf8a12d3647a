"""TRL's real GRPOTrainer on the groups of a real server: what its loss sees, and what a killed training loses."""

import math
from pathlib import Path

import pytest

from tests.kit import Json, ServerProcess, make_sample
from tests.trainers.conftest import RunScript
from tests.trainers.trl_kit import Train, group, trainings, write

pytestmark = pytest.mark.trainers

CONFIG = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "save_steps": 1}


@pytest.fixture
def train(run_script: RunScript, server: ServerProcess, trl_model: str, tmp_path: Path) -> Train:
    return trainings("train_grpo.py", CONFIG, run_script, server, trl_model, tmp_path)


def numbers(training: Json) -> list[tuple[int, int]]:
    """The steps, and the number of the group that each trained on."""
    return sorted({(row["step"], row["ids"][0] - 10) for row in training["seen"]})


def test_the_loss_is_given_what_was_stored(server: ServerProcess, train: Train) -> None:
    run = server.start_run(group_size=4, min_valid_group_size_ratio=0.5, min_valid_item_size_ratio=0.5)
    bare = [{**sample, "logprobs": ...} for sample in group(1)]
    first, second, third, fourth = group(2)
    fork = {**first, "uid": "fork", "fork": 1, "tokens": [12, 90, 91, 92, 93]}
    second |= {"outcome": "truncated", "extra_info": {"finish_reason": "length"}}
    fourth |= {"reward": None, "status": "failed", "error": "it broke", "tokens": [], "loss_mask": [], "logprobs": []}
    third |= {"loss_mask": [0, 0, 0, 1, 1], "logprobs": [0.0, 0.0, 0.0, -2.0, None]}
    write(run, *(make_sample(**sample) for sample in bare), fork, first, second, third, fourth, *group(3))
    [training] = train(run, config={**CONFIG, "per_device_train_batch_size": 8})
    mean, deviation = 2 / 3, math.sqrt(1 / 3)
    rows = {tuple(row["ids"]): row for row in training["seen"] if row["ids"][0] == 12 and any(row["mask"])}
    assert sorted(rows) == [tuple(sample["tokens"]) for sample in (first, second, third)]
    for sample, mask, logprobs in (
        (first, [1, 0, 1, 1], [-1.0, 0.0, -2.0, -3.0]),
        (second, [1, 0, 1, 1], [-1.0, 0.0, -2.0, -3.0]),
        (third, [1, 0], [-2.0, 0.0]),
    ):
        row = rows[tuple(sample["tokens"])]
        assert (row["mask"], row["logprobs"]) == (mask, logprobs)
        assert row["advantage"] == pytest.approx((sample["reward"] - mean) / (deviation + 1e-4), abs=1e-4)
    [filler] = [row for row in training["seen"] if not any(row["mask"])]
    assert (filler["ids"][0], filler["advantage"]) == (12, 0.0)
    assert sorted(row["ids"] for row in training["seen"] if row["ids"][0] == 13) == [s["tokens"] for s in group(3)]
    log = training["log"][0]
    assert log["forebay/unusable_groups"] == 1
    assert log["forebay/reward/half/mean"] == pytest.approx(((3.0 + 1.5) / 7 + 0.75) / 2)  # of two batches
    assert log["reward"] == pytest.approx((2.0 + 5.0) / 7)
    assert run.view()["groups"] == {**run.view()["groups"], "ready": 0, "acked": 3}


def test_the_logprobs_of_the_engine_are_the_old_policys(server: ServerProcess, train: Train) -> None:
    runs = [server.start_run(group_size=4) for _ in range(3)]
    for run, shift in zip(runs, (0.0, 0.1, -0.1), strict=True):
        write(run, *group(0, shift))
    # Never clipped, so that the loss is the mean of ratio times advantage.
    config = {**CONFIG, "epsilon": 1e6, "loss_type": "grpo"}
    trainings = train(runs[0], *({"run_id": run.run_id} for run in runs), config=config)
    as_stored, higher, lower = (training["log"][0]["loss"] for training in trainings)
    assert higher / as_stored == pytest.approx(math.exp(-0.1), rel=1e-3)
    assert lower / as_stored == pytest.approx(math.exp(0.1), rel=1e-3)


def test_a_killed_training_resumes_without_losing_or_repeating_a_group(server: ServerProcess, train: Train) -> None:
    run, paired = (server.start_run(group_size=4, keep_checkpoints=9) for _ in range(2))
    for number in range(8):
        write(run, *group(number))
        write(paired, *group(number))
    by_two = {"config": {**CONFIG, "max_steps": 4, "steps_per_generation": 2, "save_steps": 3}, "folder": "/paired"}
    config = {**CONFIG, "max_steps": 6, "save_steps": 2}
    [killed] = train(run, config=config, dies_after=5)
    assert numbers(killed) == [(step, step - 1) for step in range(1, 6)]
    [killed] = train(paired, by_two, dies_after=4)
    assert numbers(killed) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2), (3, 3), (4, 2), (4, 3)]
    resumed, again = train(run, {"config": config}, {**by_two, "run_id": paired.run_id}, resumes=True)
    # TRL saved steps 2 and 4. What it trained on in step 5 is in no model.
    assert numbers(resumed) == [(5, 4), (6, 5)]
    # It saved step 3, in the middle of a generation batch, which therefore comes again.
    assert {number for _, number in numbers(again)} == {2, 3}


def test_what_cannot_work_is_refused_before_anything_is_leased(server: ServerProcess, train: Train) -> None:
    run = server.start_run(group_size=4, sampling_params={"temperature": 1.0})
    write(run, *group(0))
    wrong: list[tuple[str | None, Json, Json]] = [
        ("num_generations", {"num_generations": 2}, {}),
        ("max_steps", {"max_steps": -1}, {}),
        ("steps_per_generation", {"steps_per_generation": 3, "gradient_accumulation_steps": 2}, {}),
        ("save_steps", {"save_steps": 3}, {}),
        ("save_strategy", {"save_strategy": "epoch"}, {}),
        ("temperature", {"temperature": 0.7}, {}),
        ("callbacks", {}, {"without": "callbacks"}),
        ("eval_strategy", {"eval_strategy": "steps", "per_device_eval_batch_size": 4}, {}),
        (None, {}, {"plain": True}),
        (None, {}, {"trl_version": "1.15.2"}),
    ]
    trainings = train(run, *({"config": CONFIG | config, **options} for _, config, options in wrong))
    assert [(training["kind"], training["field"]) for training in trainings] == [
        ("InvalidInput", field) for field, _, _ in wrong
    ]
    assert "forebay.client.trl.GRPOTrainer" in trainings[-2]["hint"]
    assert run.batches() == []
    run.stop()
    [ended] = train(run, config={**CONFIG, "per_device_train_batch_size": 8})
    assert (ended["kind"], run.view()["groups"]["ready"]) == ("RunEnded", 1)
