"""examples/grpo_loop/replay_steps.py: the batches of some steps once more, and the same model from them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.grpo_kit import LOOP, SMALL, LoopProcess

REPLAY_LIMIT_S = 200.0
NUM_STEPS = 5


def replay_steps(folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(LOOP.with_name("replay_steps.py")), "--dir", str(folder), *SMALL[:2], *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=REPLAY_LIMIT_S, check=False)


@pytest.mark.soak
def test_the_batches_of_three_steps_make_the_same_model_again(tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    loop = LoopProcess(folder, None, "--keep-models", str(NUM_STEPS + 1))
    with loop.running(NUM_STEPS) as process:
        said, _ = process.communicate(timeout=REPLAY_LIMIT_S)
    assert process.returncode == 0, said

    done = replay_steps(folder, "--steps", "3-5")
    assert done.returncode == 0, done.stdout + done.stderr
    new, recorded = (path / "step-00005" / "model.safetensors" for path in (folder / "replayed", folder / "models"))
    assert new.read_bytes() == recorded.read_bytes()
    assert [line for line in done.stdout.splitlines() if "again" in line] == [
        f"step {step}: trained on 16 samples again" for step in (3, 4, 5)
    ]

    # The order of the minibatches is another one: so it is seen that not just anything makes the same model.
    other = replay_steps(folder, "--steps", "3-5", "--seed", "1")
    assert other.returncode == 1, other.stdout + other.stderr
    assert "differs from" in other.stdout

    shutil.rmtree(folder / "models" / "step-00002")
    refused = replay_steps(folder, "--steps", "3-5")
    assert refused.returncode == 2
    assert "--keep-models" in refused.stderr
