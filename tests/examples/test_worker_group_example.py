"""examples/worker_group: the same answers, scored the same, wherever the workers run."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/worker_group/score_answers.py"
LIMIT_S = 180.0


@pytest.mark.parametrize("backend", ["inline", "processes", pytest.param("ray", marks=pytest.mark.ray)])
def test_answers_are_scored_in_stages(backend: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--backend", backend, "--workers", "3"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("(")]  # Ray's own
    assert [line.partition(" on ")[0] for line in lines[:3]] == [f"worker {rank} of 3" for rank in range(3)]
    assert lines[3] == "6 of 10 answers are right"
    rows = [line.split(maxsplit=5) for line in lines[4:14]]
    assert [float(row[3]) for row in rows] == [1.0, 1.0, 0.5, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert [float(row[4]) for row in rows[4:]] == [1.0, -1.0, -1.0, 1.0, -1.0, 1.0]
    num_processes = 1 if backend == "inline" else 3
    assert lines[14] == f"scored 10 answers in {num_processes} processes: 4, 3, 3"
