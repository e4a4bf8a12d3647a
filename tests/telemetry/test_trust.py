"""A report says which data of a log cannot be true, and has no findings that rest on it."""

import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import ProfileReport
from tests.telemetry.planted_log import PlannedStep, clean_step, write_log
from tests.telemetry.planted_trace import PlantedTrace

Line = dict[str, Any]
Change = Callable[[Line], list[Line]]
NO_FINDINGS = "There are no findings about these steps."


def steps_with_a_fault(number: int = 4) -> list[PlannedStep]:
    """A reward in step 2 that any report names."""
    rng = random.Random(5)
    steps = [clean_step(rng, place, 2, 12) for place in range(number)]
    steps[1].workers["0"][3].reward_s = 200.0
    return steps


def report_of(folder: Path, change: Change, steps: list[PlannedStep] | None = None) -> ProfileReport:
    write_log(folder, steps or steps_with_a_fault())
    for path in folder.rglob("*.jsonl"):
        lines = [each for text in path.read_text().splitlines() for each in change(json.loads(text))]
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return analyse(load(folder))


def scaled(factor: float, *events: str, step: int | None = None) -> Change:
    """The durations of ``events``, or of all, in one step or all."""

    def change(line: Line) -> list[Line]:
        is_meant = line["event"] in events or not events
        if is_meant and "duration_sec" in line and step in (None, line["step"]):
            line["duration_sec"] *= factor
        return [line]

    return change


def test_a_log_that_can_be_true_has_its_finding_and_no_note(tmp_path: Path) -> None:
    report = report_of(tmp_path, lambda line: [line])
    assert ([finding.cause for finding in report.findings], report.notes) == (["reward"], [])


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (scaled(1.6, "turn_engine_call", step=2), "1 of 4 steps (2)"),
        (scaled(40, "preprocessing_duration"), "4 of 4 steps (1, 2, 3, 4)"),
    ],
)
def test_parts_that_are_longer_than_the_whole_are_noted(tmp_path: Path, change: Change, steps: str) -> None:
    steps_of = steps_with_a_fault()
    for step in steps_of:
        step.phases["preprocessing"] = 5.0
    report = report_of(tmp_path, change, steps_of)
    assert report.findings == []
    assert report.notes == [
        f"In {steps}, the parts of requests or workers add up to more than the whole. {NO_FINDINGS}"
    ]


def test_what_a_worker_does_at_the_same_time_may_add_up_to_more(tmp_path: Path) -> None:
    def with_rewards(line: Line) -> list[Line]:
        if line["event"] != "total_step_duration":
            return [line]
        end, lasts = datetime.fromisoformat(line["timestamp"]), 0.6 * line["duration_sec"]
        rewards = [line | {"event": "reward_duration", "duration_sec": lasts}]
        for place in range(4):
            moment = (end - timedelta(seconds=place)).isoformat(timespec="microseconds")
            rewards.append(line | {"event": "judge_duration", "duration_sec": lasts, "timestamp": moment})
        return [*rewards, line]

    assert report_of(tmp_path, with_rewards).notes == []


def test_a_single_request_that_cannot_be_true_has_no_finding_and_the_others_do(tmp_path: Path) -> None:
    steps = steps_with_a_fault()
    wrong = steps[1].workers["0"][3].request_id

    def change(line: Line) -> list[Line]:
        if line.get("extra", {}).get("request_id") == wrong and line["event"] == "turn_engine_call":
            line["duration_sec"] += 1_000.0
        return [line]

    steps[2].workers["1"][3].reward_s = 150.0
    report = report_of(tmp_path, change, steps)
    assert [(finding.cause, finding.path.step) for finding in report.findings] == [("reward", "3")]


def test_steps_that_overlap_are_noted(tmp_path: Path) -> None:
    report = report_of(tmp_path, scaled(2.5, "total_step_duration", step=2))
    assert report.findings == []
    assert report.notes == [
        f"In 1 of 4 steps (2), the duration is longer than the time since the step before. {NO_FINDINGS}"
    ]


@pytest.mark.parametrize("num_steps", [1, 4])
def test_milliseconds_in_place_of_seconds_are_noted(tmp_path: Path, num_steps: int) -> None:
    report = report_of(tmp_path, scaled(1_000), steps_with_a_fault()[:num_steps])
    assert report.findings == []
    assert report.notes
    assert all("durations seem to be milliseconds, not seconds" in note for note in report.notes)


def test_durations_that_were_recorded_in_milliseconds_are_noted_without_starts_of_requests(tmp_path: Path) -> None:
    def only_ends(line: Line) -> list[Line]:
        return scaled(1_000)(line) if line["event"].startswith(("async_rollout_request", "total")) else []

    report = report_of(tmp_path, only_ends)
    assert report.findings == []
    note = report.notes[0]
    assert note.startswith("In 4 of 4 steps (1, 2, 3, 4), the duration is longer than the time since the step before")
    assert "milliseconds" in note


@pytest.mark.parametrize("later_s", [0.0, 2.5])
def test_a_log_that_was_written_twice_is_noted(tmp_path: Path, later_s: float) -> None:
    def twice(line: Line) -> list[Line]:
        later = datetime.fromisoformat(line["timestamp"]) + timedelta(seconds=later_s)
        return [line, line | {"timestamp": later.isoformat(timespec="microseconds")}]

    report = report_of(tmp_path, twice)
    assert report.findings == []
    assert [note.partition(",")[0] for note in report.notes] == ["In 4 of 4 steps (1"]
    assert "most requests end twice at the same worker, as if the log had been written twice" in report.notes[0]


def without_tokens(line: Line) -> list[Line]:
    for name in ("generated_tokens", "actual_response_tokens"):
        line.get("extra", {}).pop(name, None)
    return [line]


def test_without_numbers_of_tokens_no_answer_is_long_and_no_engine_slow(tmp_path: Path) -> None:
    steps = steps_with_a_fault()
    steps[3].workers["1"][4].turns[0].engine_s = 400.0
    report = report_of(tmp_path, without_tokens, steps)
    assert not {finding.cause for finding in report.findings} & {"long_answer", "slow_rate", "slow_engine", "network"}
    assert "reward" in {finding.cause for finding in report.findings}
    (note,) = report.notes
    assert note.endswith("have no number of sampled tokens: the report cannot tell long answers from slow engines.")


def test_phases_of_a_trace_that_exceed_their_rollout_are_noted(tmp_path: Path) -> None:
    trace = PlantedTrace(tmp_path)
    run, server = trace.file("run"), trace.file("server")
    for number in range(4):
        run.rollout(f"a/{number}", 0, 10, sampled=10, phases={"decode": 10.0, "reward": 9.0})
    server.read(1, 10, 11, ["a"], step=7)
    report = analyse(load(tmp_path))
    assert report.findings == []
    assert [note for note in report.notes if "add up to more than the whole" in note]
