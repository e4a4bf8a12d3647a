"""Datums and the example's loop, with the real package ``tinker``; only its service is a stand-in."""

import json
import math
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kit import Json, NativeRun, ServerProcess, make_sample
from tests.trainers.conftest import ENVIRON, RunScript

pytestmark = pytest.mark.trainers

EXAMPLE = Path(__file__).parents[2] / "examples" / "tinker"
PROMPT, ANSWER, NUM_TOKENS = 1, 7, 512


def sample(uid: str, reward: float, mask: list[int], **changes: object) -> Json:
    """A sample with random tokens, and logprobs for those that are trained on."""
    rng = np.random.default_rng(int.from_bytes(uid.encode()))
    logprobs = np.where(mask, -rng.random(len(mask)), np.nan).astype(np.float32)
    tokens = rng.integers(0, 1_000, len(mask), dtype=np.int32)
    arrays = {"tokens": tokens, "logprobs": logprobs, "loss_mask": np.array(mask, np.uint8)}
    return make_sample(uid=uid, reward=reward, epoch=0, **arrays, **changes)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_datums_are_the_stored_tokens_shifted_by_one(
    server: ServerProcess, run_script: RunScript, as_tensors: bool
) -> None:
    run = server.start_run(group_size=2)
    whole = [
        sample("several turns", 1.0, [0, 0, 1, 1, 0, 0, 1], slot=0, rollout_id="r"),
        sample("fork", 1.0, [0, 1, 1], slot=0, rollout_id="r", fork=1),
        sample("one turn", 0.0, [0, 1, 1, 1, 1], slot=1),
    ]
    bare = [make_sample(uid=f"bare-{n}", instance_id="bare", reward=float(n), tokens=[1, 2], epoch=0) for n in (0, 1)]
    run.send([*bare, *whole])
    asked = {"url": server.url, "run_id": run.run_id, "num_groups": 2, "as_tensors": as_tensors}
    made = run_script("tinker_datums.py", loss_fn=None, **asked)
    rewards = dict(made["rewards"])
    assert made["inputs"] == [each["tokens"][:-1].tolist() for each in whole]
    for each, values in zip(whole, made["values"], strict=True):
        weights = each["loss_mask"][1:].astype(float)
        assert values.pop("target_tokens") == each["tokens"][1:].tolist()
        assert values.pop("weights") == weights.tolist()
        assert values.pop("logprobs") == np.nan_to_num(each["logprobs"][1:]).tolist()
        assert values.pop("advantages") == (np.float32(rewards[each["uid"]]) * weights).tolist()
        assert values == {}
    assert made["types"] == {
        "target_tokens": "int64", "weights": "float32", "logprobs": "float32", "advantages": "float32"
    }  # fmt: skip
    assert made["passed"] == [["bare", "sample 'bare-0' has no logprobs"]]
    supervised = run_script("tinker_datums.py", loss_fn="cross_entropy", **asked)
    assert [list(values) for values in supervised["values"]] == [["target_tokens", "weights"]] * 5
    assert supervised["passed"] == []


def guesses(instance_id: str, rng: random.Random) -> list[Json]:
    """A group of one right guess and three others, by a policy that has learnt nothing."""
    known = {"logprobs": [0.0, -math.log(NUM_TOKENS)], "loss_mask": [0, 1], "instance_id": instance_id}
    tokens = [ANSWER, *(rng.randrange(ANSWER + 1, NUM_TOKENS) for _ in range(3))]
    return [make_sample(tokens=[PROMPT, token], reward=float(token == ANSWER), **known) for token in tokens]


def test_the_loop_lowers_its_loss_and_resumes_from_the_model_it_has(
    server: ServerProcess, trainers_python: str, tmp_path: Path
) -> None:
    run = server.start_run(group_size=4, name="guesses")
    rng = random.Random(0)
    run.send(sample for n in range(40) for sample in guesses(f"task-{n}", rng))
    run.stop()
    models = tmp_path / "models.jsonl"
    places = ["--url", server.url, "--models", models, "--local", tmp_path / "saved"]

    def loop() -> list[Json]:
        command = [trainers_python, EXAMPLE / "loop.py", "guesses", *places, "--learning-rate", "0.1"]
        ended = subprocess.run(
            command, env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines()]

    first = loop()
    losses = [step["loss:sum"] for step in first]
    assert [step["step"] for step in first] == list(range(1, 11))
    assert losses[-1] < losses[4] < losses[0] - 1
    # As if the loop had been killed after a checkpoint, before its model was listed.
    models.write_text("".join(models.read_text().splitlines(keepends=True)[:-1]))
    [again] = loop()
    assert (again["step"], again["loss:sum"]) == (10, losses[-1])
    assert [checkpoint["num_groups"] for checkpoint in _checkpoints(run)] == [4] * 10


def _checkpoints(run: NativeRun) -> list[Json]:
    checkpoints: list[Json] = run.client.get(f"{run.path}/checkpoints").json()["checkpoints"]
    return checkpoints
