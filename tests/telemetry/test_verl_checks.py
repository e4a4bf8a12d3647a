"""What verl's profile log counts but does not have: requests, files, steps."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.telemetry.analysis import analyse, load
from tests.telemetry.planted_log import MOMENT_S, clean_step, iso, write_log

Write = Callable[..., Path]


def line(event: str, end_s: float, duration: float, **more: Any) -> dict[str, Any]:
    return {"timestamp": iso(MOMENT_S + end_s), "event": event, "duration_sec": duration} | more


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_lines(*lines: dict[str, Any]) -> Path:
        (tmp_path / "step_1").mkdir()
        (tmp_path / "step_1/worker_0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        return tmp_path

    return write_lines


@pytest.mark.parametrize(("completed", "thrown"), [(921, 103), (None, 1)])
def test_requests_that_only_monitoring_counts_are_counted(write: Write, completed: int | None, thrown: int) -> None:
    monitoring = {"total_requests": 1024} | ({} if completed is None else {"completed_count": completed})
    folder = write(
        line("aborted_request", 84.51, 84.51, extra={"request_id": "r7"}, workid=0),
        line("async_rollout_request_complete", 80.0, 80.0, extra={"request_id": "r1"}, workid=0),
        line("async_rollout_with_monitoring_duration", 84.51, 84.51, extra=monitoring, workid=0),
        line("async_rollout_request_complete", 80.0, 80.0, extra={"request_id": "r2"}, workid=1),
        line("total_step_duration", 84.51, 84.51, workid=0),
    )
    report = analyse(load(folder))
    (summary,) = report.steps
    counts = (summary.num_requests, summary.num_used, summary.thrown_requests)
    assert counts == (1025, 1025 - thrown, thrown)
    assert not [note for note in report.notes if "monitored" in note]
    assert analyse(load(folder), worker="1").num_requests == 1


def test_more_requests_than_were_monitored_are_noted(write: Write) -> None:
    ends = [line("async_rollout_request_complete", 9, 9.0, extra={"request_id": f"r{at}"}) for at in range(3)]
    told = line("async_rollout_with_monitoring_duration", 9, 9.0, extra={"total_requests": 2, "completed_count": 2})
    report = analyse(load(write(*ends, told, line("total_step_duration", 9, 9.0))))
    assert report.num_requests == 3
    assert "1 of 1 steps have lines of more requests than were monitored." in report.notes


def test_files_and_steps_that_are_missing_are_noted(tmp_path: Path) -> None:
    rng = random.Random(1)
    write_log(tmp_path, [clean_step(rng, place, 3, 8) for place in range(8)])
    assert analyse(load(tmp_path)).notes == []
    (tmp_path / "step_3/worker_2.jsonl").unlink()
    (tmp_path / "step_6/worker_2.jsonl").write_text("")
    shutil.rmtree(tmp_path / "step_5")
    assert analyse(load(tmp_path)).notes == [
        "Files are missing from the log in 2 steps: 3 (worker_2), 6 (worker_2).",
        "1 steps are missing from the log: 5.",
    ]


def test_steps_at_longer_distances_are_not_missing(tmp_path: Path) -> None:
    rng = random.Random(1)
    write_log(tmp_path, [clean_step(rng, place, 2, 8) for place in range(4)])
    for number in (4, 3, 2, 1):
        (tmp_path / f"step_{number}").rename(tmp_path / f"step_{10 * number}")
    assert analyse(load(tmp_path)).notes == []
