"""The requests of a step over time, as a report keeps them for its pictures."""

from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.lanes import MOST_LANES, MOST_STEPS
from tests.telemetry.planted_log import PlannedRequest, PlannedStep, PlannedTurn, write_log


def planned_step(number: int, num_requests: int = 5, slow_s: float = 60.0) -> PlannedStep:
    """Requests that end after each other on two workers; the last one called a tool for 20 s."""
    requests = [
        PlannedRequest(f"{number}-{place}", [PlannedTurn(100, 10.0 + place)], reward_s=0.0)
        for place in range(num_requests - 1)
    ]
    slow = PlannedRequest(f"{number}-slow", [PlannedTurn(50, slow_s, tool_s=20.0), PlannedTurn(50, 5.0)], reward_s=0.0)
    return PlannedStep({"0": requests[::2], "1": [slow, *requests[1::2]]})


def test_each_request_is_a_row_of_its_phases_and_the_last_one_is_marked(tmp_path: Path) -> None:
    (step,) = analyse(load(write_log(tmp_path, [planned_step(1)]))).lanes
    assert step.num_requests == 5
    assert [lane.worker for lane in step.lanes] == ["0", "0", "1", "1", "1"]
    (last,) = [lane for lane in step.lanes if lane.is_last]
    assert last.request == "1-slow"
    begin_s = last.pieces[0][1]
    assert [(name, pytest.approx(at - begin_s, abs=0.1), pytest.approx(s, abs=0.1)) for name, at, s in last.pieces] == [
        ("engine", 0.0, 60.0),
        ("tool", 60.0, 20.0),
        ("engine", 80.0, 5.0),
    ]
    counts = [number for _, number in step.in_flight]
    assert (max(counts), counts[-1]) == (5, 0)
    moment_of_one = next(moment for moment, number in step.in_flight if number == 1)
    assert moment_of_one - begin_s == pytest.approx(13.0, abs=0.1)


def test_a_step_of_many_requests_keeps_the_last_the_slowest_and_some_of_the_others(tmp_path: Path) -> None:
    (step,) = analyse(load(write_log(tmp_path, [planned_step(1, num_requests=300, slow_s=400.0)]))).lanes
    assert step.num_requests == 300
    kept = {lane.request for lane in step.lanes}
    assert len(step.lanes) == len(kept) == MOST_LANES
    assert {"1-slow", "1-298", "1-297", "1-296", "1-0"} <= kept
    assert len(kept & {f"1-{place}" for place in range(150)}) >= 10


def test_of_many_steps_the_longest_are_kept(tmp_path: Path) -> None:
    steps = [planned_step(number, slow_s=30.0 + (number * 7) % 40) for number in range(1, 41)]
    report = analyse(load(write_log(tmp_path, steps)))
    longest = sorted(report.steps, key=lambda step: -step.seconds)[: MOST_STEPS // 2]
    assert len(report.lanes) == MOST_STEPS
    assert {step.name for step in longest} <= {step.step for step in report.lanes}
    assert [step.step for step in report.lanes] == sorted((step.step for step in report.lanes), key=int)
