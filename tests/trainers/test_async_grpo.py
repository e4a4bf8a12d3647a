"""TRL's real AsyncGRPOTrainer on the groups of a real server; its attention kernel is a stand-in for the CPU."""

import math
from collections import Counter
from pathlib import Path

import pytest

from tests.kit import Json, ServerProcess, make_sample
from tests.trainers.conftest import RunScript
from tests.trainers.trl_kit import Train, group, trainings, write

pytestmark = pytest.mark.trainers

CONFIG = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_steps": 1}


@pytest.fixture
def train(run_script: RunScript, server: ServerProcess, trl_model: str, tmp_path: Path) -> Train:
    return trainings("train_async.py", CONFIG, run_script, server, trl_model, tmp_path)


def groups(training: Json) -> list[tuple[int, int]]:
    """The steps, and the number of the group that each trained on."""
    return sorted({(sample["step"], sample["terms"][0][0] - 50) for sample in training["seen"]})


def test_the_loss_is_given_what_was_stored_forks_too(server: ServerProcess, train: Train) -> None:
    run, *others = (server.start_run(group_size=4) for _ in range(3))
    samples = group(2)
    fork = {**samples[0], "uid": "fork", "fork": 1, "tokens": [12, 90, 91, 92, 93]}
    samples[3] |= {"loss_mask": [0, 1, 0, 0, 1], "logprobs": [None, -1.0, None, None, -3.0]}
    bare = [make_sample(**{**sample, "logprobs": ...}) for sample in group(1)]
    # TRL waits for one micro-batch more than it trains on.
    write(run, *bare, fork, *samples, *group(3), *group(4))
    for other, shift in zip(others, (0.0, -0.1), strict=True):
        write(other, *group(0, shift), *group(1))
    five = {"config": {**CONFIG, "per_device_train_batch_size": 5}}
    training, as_stored, lower = train(
        run, five, *({"run_id": other.run_id, "folder": f"/{other.run_id}"} for other in others)
    )
    terms = sorted([[token, logprob] for token, logprob, _ in sample["terms"]] for sample in training["seen"])
    assert terms == sorted(
        [
            [token, logprob]
            for token, logprob, mask in zip(*(each[name] for name in ("tokens", "logprobs", "loss_mask")), strict=True)
            if mask
        ]
        for each in [*samples, fork]
    )
    assert training["log"][0]["forebay/unusable_total"] == 1
    assert training["log"][0]["rewards/half"] == pytest.approx(3.0 / 5)  # of a group and its fork
    assert run.view()["groups"]["acked"] == 2
    advantages = {sample["terms"][0][0]: sample["terms"][0][2] for sample in training["seen"]}
    assert advantages[90] == advantages[50] < 0 < advantages[53]
    assert lower["log"][0]["ratio"] / as_stored["log"][0]["ratio"] == pytest.approx(math.exp(0.1), rel=1e-3)


def test_a_killed_training_resumes_without_losing_or_repeating_a_group(server: ServerProcess, train: Train) -> None:
    run = server.start_run(group_size=4, keep_checkpoints=9)
    for number in range(8):
        write(run, *({**sample, "tokens": [10, 50 + number, 7, 8, 9]} for sample in group(number)))
    config = {**CONFIG, "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2}
    config |= {"gradient_accumulation_steps": 2}
    [killed] = train(run, config=config, dies_after=5)
    assert groups(killed) == [(step, step - 1) for step in range(1, 6)]
    # TRL saved step 4. What it trained on in step 5 is in no model, and what it collated for step 6 in none either.
    [resumed] = train(run, config=config)
    assert groups(resumed) == [(5, 4), (6, 5)]


def test_groups_that_trl_cannot_train_on_are_passed_over_and_marked(server: ServerProcess, train: Train) -> None:
    run = server.start_run(group_size=4)
    first, *others = group(0)
    long = {**first, "tokens": [10, 50, *range(1, 20)], "loss_mask": [0] + [1] * 20, "logprobs": [-1.0] * 21}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    shown = {"messages": [{"role": "user", "content": [picture]}]}
    write(run, long, *others)
    for number in range(1, 6):
        write(run, *(make_sample(**{**sample, "logprobs": ...}) for sample in group(number)))
    write(run, *({**sample, **shown} for sample in group(6)))
    write(run, *({**sample, "loss_mask": [0] * 5} for sample in group(7)))
    main, *others = group(8)
    fork = {**main, "uid": "fork", "fork": 1, "loss_mask": [1, 0, 0, 0, 0], "logprobs": [-1.0] * 5}
    # The very first token has no prediction. The four other rows of a group fill the budget of a micro-batch.
    write(run, fork, main, *others, *group(9), *group(10), *group(11))
    [training] = train(run, config={**CONFIG, "max_steps": 2, "save_strategy": "no", "token_budget": 20})
    counts = Counter((sample["step"], sample["terms"][0][0]) for sample in training["seen"])
    assert counts == {(step, 50 + slot): 1 for step in (1, 2) for slot in range(4)}
    assert sum(entry.get("forebay/unusable_total", 0) for entry in training["log"]) == 8
    # Reading ends with the training. What was read for the third micro-batch is released.
    assert "forebay-rollouts" not in training["threads"]
    assert (training["groups"]["acked"], training["groups"]["ready"]) == (10, 2)


def test_what_cannot_work_is_refused_before_anything_is_leased(server: ServerProcess, train: Train) -> None:
    run, ended = (server.start_run(group_size=4, sampling_params={"temperature": 1.0}) for _ in range(2))
    write(run, *group(0))
    write(ended, *group(0), *group(1))
    ended.stop()
    wrong: dict[str, object] = {"token_budget": None, "max_staleness": 1, "save_steps": 3, "save_strategy": "epoch"}
    wrong["temperature"] = 0.7
    refused = train(
        run,
        *({"config": {**CONFIG, field: value}} for field, value in wrong.items()),
        {"without": "callbacks"},
        {"run_id": ended.run_id, "times": 2, "folder": "/twice"},
        {"run_id": ended.run_id, "config": {**CONFIG, "max_steps": 2}},
    )
    *fields, twice, spent = [(each["kind"], each["field"]) for each in refused]
    assert fields == [("InvalidInput", field) for field in (*wrong, "callbacks")]
    assert run.batches() == []
    assert "keep_checkpoints=4, the run has 3" in refused[2]["message"]
    assert (twice, "one training" in refused[-2]["message"]) == (("InvalidInput", None), True)
    assert spent == ("RunEnded", None)
