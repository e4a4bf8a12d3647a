"""examples/trl: the model learns, and every group is in the surviving model once, whatever is killed meanwhile."""

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from forebay.engines.tiny.model import ensure_model, load_model
from forebay.engines.tiny.recipe import answer_probabilities, build_lesson
from tests.conftest import MakeServer
from tests.engines.tiny.conftest import running_engine
from tests.kit import Json, NativeRun, ServerProcess, poll_until, run_ids
from tests.trainers.conftest import ENVIRON, HERE

EXAMPLE = HERE.parents[1] / "examples" / "trl" / "train.py"
NUM_GROUPS = 32
START_S, LIMIT_S = 120.0, 900.0


class Training:
    """The example in a folder, attempt by attempt."""

    def __init__(self, python: str, folder: Path, server: ServerProcess, engine_url: str, model: Path) -> None:
        self._notes = folder / "notes.jsonl"
        self._checkpoints = folder / "example" / "checkpoints"
        self._command = [python, HERE / "watch_trl_example.py", EXAMPLE, self._notes]
        self._options = ["--url", server.url, "--engine-url", engine_url, "--model", model]
        self._options += ["--dir", folder / "example", "--steps"]
        self._log = folder / "log"
        self.num_attempts = 0

    def start(self, num_steps: int) -> "subprocess.Popen[bytes]":
        self.num_attempts += 1
        command = [*map(str, [*self._command, self.num_attempts, *self._options, num_steps])]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, env={**os.environ, **ENVIRON}, stdout=log, stderr=log)

    def reads(self) -> list[tuple[int, int, list[str]]]:
        """Attempt, step and groups of each batch that was read."""
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []

    def surviving(self) -> dict[int, list[str]]:
        """The groups of each step that the last model has seen: what a later attempt read again does not count."""
        first_steps: dict[int, int] = {}
        for attempt, step, _ in self.reads():
            first_steps.setdefault(attempt, step)
        kept: dict[int, list[str]] = {}
        for attempt, step, groups in self.reads():
            if step < min((first for later, first in first_steps.items() if later > attempt), default=step + 1):
                kept[step] = kept.get(step, []) + groups
        return kept

    def state(self, step: int) -> Json:
        state: Json = json.loads((self._checkpoints / f"checkpoint-{step}" / "trainer_state.json").read_text())
        return state

    def log(self) -> str:
        return self._log.read_text()[-6_000:]


def accuracy(folder: Path) -> float:
    """The probability of a right answer."""
    model = load_model(folder)
    return float(answer_probabilities(model.network, build_lesson(model.tokenizer)).mean())


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("num_kills", "num_steps"),
    [pytest.param(3, 60, marks=pytest.mark.trainers), pytest.param(20, 120, marks=pytest.mark.soak)],
)
def test_a_model_learns_from_each_group_once_whatever_is_killed(
    make_server: MakeServer, trainers_python: str, tmp_path: Path, num_kills: int, num_steps: int
) -> None:
    server, dice, model = make_server(), random.Random(num_kills), ensure_model()
    with running_engine("--model-path", str(model)) as (_, engine_url):
        training = Training(trainers_python, tmp_path, server, engine_url, model)
        process = training.start(num_steps)
        for number in range(num_kills):
            num_reads = len(training.reads())
            poll_until(lambda: len(training.reads()) > num_reads or process.poll() is not None, START_S)  # noqa: B023
            assert process.poll() is None, training.log()
            time.sleep(dice.uniform(0, 2))  # not to wait, but to kill it anywhere in a step
            if number % 2:
                server.kill9()
                server.restart()
            else:
                process.kill()
                process.wait()
                process = training.start(num_steps)
        assert process.wait(LIMIT_S) == 0, training.log()
    kept = training.surviving()
    groups = [group for step in kept for group in kept[step]]
    assert sorted(kept) == list(range(2, num_steps + 1, 2))
    assert len(set(groups)) == len(groups) == num_steps // 2 * NUM_GROUPS
    [run_id] = run_ids(server)
    assert NativeRun(server, run_id).view()["groups"]["acked"] == len(groups)
    losses = [entry["step"] for entry in training.state(num_steps)["log_history"] if "loss" in entry]
    assert losses == list(range(1, num_steps + 1))
    assert accuracy(tmp_path / "example" / "checkpoints" / f"checkpoint-{num_steps}") > accuracy(model) + 0.05
