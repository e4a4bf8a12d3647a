"""examples/skip_steps: a second run executes nothing, and trains on the same numbers."""

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/skip_steps/train.py"


def train(dump_dir: Path, *options: str) -> tuple[str, str]:
    """The losses, and what was executed."""
    command = [sys.executable, str(EXAMPLE), "--dump-dir", str(dump_dir), *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    losses, executed = ended.stdout.splitlines()
    return losses, executed


def test_the_second_run_of_a_stream_executes_nothing(tmp_path: Path) -> None:
    losses, executed = train(tmp_path, "--stream")
    assert executed == "4 rollouts executed"
    assert train(tmp_path, "--stream") == (losses, "0 rollouts executed")


def test_the_second_run_executes_nothing_and_a_third_what_is_missing(tmp_path: Path) -> None:
    losses, executed = train(tmp_path)
    assert executed == "4 rollouts executed"
    assert train(tmp_path) == (losses, "0 rollouts executed")
    shutil.rmtree(next(tmp_path.glob("*/*/2")))
    again, executed = train(tmp_path)
    assert executed == "1 rollouts executed"
    changed = [one != other for one, other in zip(losses.split(), again.split(), strict=True)]
    assert sum(changed) == 1


def test_repeat_executes_one_rollout_for_all_steps(tmp_path: Path) -> None:
    losses, executed = train(tmp_path, "--action", "repeat", "--stream", "--steps", "6")
    assert (executed, len(set(losses.split()))) == ("1 rollouts executed", 1)
