"""What is exported in the published layout is read back as the same report, whoever wrote the log."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.export.published import export_published
from tests.telemetry.planted_log import PlannedRequest, PlannedTurn, clean_step, write_log
from tests.telemetry.planted_trace import PlantedTrace

RESOLUTION_S = 2e-6
"""The layout's times are in microseconds."""


def assert_same(left: Any, right: Any, place: str = "report") -> None:
    """Numbers to the layout's resolution, all else exactly."""
    if isinstance(left, dict):
        assert isinstance(right, dict), place
        assert left.keys() == right.keys(), place
        for key, value in left.items():
            assert_same(value, right[key], f"{place}.{key}")
    elif isinstance(left, list):
        assert isinstance(right, list), place
        assert len(left) == len(right), place
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{place}[{number}]")
    elif isinstance(left, float):
        assert right == pytest.approx(left, rel=1e-6, abs=RESOLUTION_S), place
    else:
        assert left == right, place


def plain(report: ProfileReport) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(report.as_json())
    del found["source"]
    return found


def again(folder: Path, tmp_path: Path) -> tuple[ProfileReport, ProfileReport, Path]:
    written = tmp_path / "written"
    export_published(load(folder), written)
    return analyse(load(folder)), analyse(load(written)), written


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three steps of two engines: a tool, an engine that told its parts, a failure, an abort, a stall, an open one."""
    planted = PlantedTrace(tmp_path / "trace")
    run, server = planted.file("run"), planted.file("server")
    for number in range(3):
        begin = number * 100.0 + 0.1234567891
        for place in range(8):
            _rollout(run, number, place, begin)
        ready = begin + (80.0 if number == 1 else 60.0)
        server.group(f"g{number}", "ready", ready, last=f"g{number}/7")
        late = 15.0 if number == 2 else 0.0
        by = "" if late else f"g{number}"
        times = {"judged": ready + late + 1, "first_byte": ready + late + 2}
        server.read(
            begin + 5 if by else ready + late,
            ready + late,
            ready + late + 4,
            [f"g{number}"],
            step=number,
            by=by,
            **times,
        )
    run.stall(130, 140, ["tool.py:7 parse"])
    run.rollout("g1/8", 100, 150, ending="aborted", sampled=90)
    run.rollout("g1/9", 100, 120, ending="failed", outcome="engine_failure", attempt=0)
    server.weights(99, 7)
    run.open("engine", 275, "g9/0", group="g9", at="x")
    run.dropped(290, 12, "budget")
    return planted.folder


def _rollout(run: Any, number: int, place: int, begin: float) -> None:
    uid, engine = f"g{number}/{place}", f"http://e{place % 2}:30000"
    end = begin + 50 + place + (20 if number == 1 and place == 7 else 0)
    reward = float(place % 3)
    turns = [
        (begin + 2, begin + 30, {"decode": 25.0, "prefill": 1.0, "tool": 2.0}, {"sampled": 250, "engine": engine}),
        (begin + 30, end, {"engine": end - begin - 31, "reward": 1.0}, {"sampled": 200, "engine": engine}),
    ]
    phases = {"queue": 2.0, "decode": 25.0, "prefill": 1.0, "tool": 2.0, "engine": end - begin - 31, "reward": 1.0}
    summary = run.rollout(
        uid,
        begin,
        end,
        phases=phases,
        turns=turns,
        engine=engine,
        sampled=450,
        prompt=900,
        cached=300,
        reward=reward,
        reward_cpu_s=0.5,
        has_spans=True,
    )
    group = f"g{number}"
    run.span("queue", begin, begin + 2, uid, up=summary, group=group)
    first = run.span("turn", begin + 2, begin + 28, uid, up=summary, turn=0, group=group)
    run.span("prefill", begin + 2, begin + 3, uid, up=first, turn=0, group=group, engine=engine)
    run.span("decode", begin + 3, begin + 28, uid, up=first, turn=0, group=group, engine=engine, event="odd", worker=1)
    run.span("tool", begin + 28, begin + 30, uid, up=summary, turn=0, group=group)
    run.span("engine", begin + 30, end - 1, uid, up=summary, turn=1, group=group, engine=engine)
    run.span("reward", end - 1, end, uid, up=summary, group=group, cpu_s=0.5)


def test_a_trace_that_is_exported_and_read_has_the_same_report(trace: Path, tmp_path: Path) -> None:
    before, after, _ = again(trace, tmp_path)
    assert before.num_steps >= 3
    assert {finding.cause for finding in before.findings} >= {"blocked_loop", "late_trainer"}
    assert any("12 spans" in note for note in before.notes)
    assert_same(plain(before), plain(after))


def test_a_published_log_that_is_exported_and_read_has_the_same_report(tmp_path: Path) -> None:
    rng = random.Random(5)
    steps = [clean_step(rng, place, 2, 12) for place in range(3)]
    steps[1].workers["0"][1].turns[1].engine_s = 200.0
    steps[2].workers["1"].append(PlannedRequest("gone", [PlannedTurn(300, 40.0)], aborted_at_s=40.0))
    steps[2].has_total = False
    before, after, written = again(write_log(tmp_path / "logs", steps), tmp_path)
    assert [finding.cause for finding in before.findings] == ["stalled_engine"]
    assert_same(plain(before), plain(after))
    assert sorted(path.name for path in written.iterdir()) == ["step_1", "step_2", "step_3"]


def test_workers_have_the_phases_of_the_layout(trace: Path, tmp_path: Path) -> None:
    *_, written = again(trace, tmp_path)
    lines = lines_of(written / "step_1/worker_0.jsonl")
    seconds = {line["event"]: line["duration_sec"] for line in lines if "extra" not in line}
    assert seconds == pytest.approx(
        {
            "preprocessing_duration": 102 - 64,
            "async_generate_duration": 156 - 102,
            "barrier_wait_duration": 180 - 156,
            "data_extraction_duration": 1.0,
            "batch_construction_duration": 1.0,
            "final_construction_duration": 2.0,
            "total_step_duration": 184 - 64,
        },
        abs=0.001,
    )
    events = {line["event"] for line in lines}
    assert not events & {"broadcast_duration", "sorting_duration", "concatenation_duration"}
    assert {
        "request_start",
        "turn_start",
        "turn_end",
        "turn_engine_call",
        "tool_execution",
        "reward_calculation",
    } <= events
    assert all(list(line)[:2] == ["timestamp", "event"] for line in lines)


def test_published_scripts_find_turn_timings_and_whole_engine_calls(trace: Path, tmp_path: Path) -> None:
    *_, written = again(trace, tmp_path)
    lines = [
        line
        for line in lines_of(written / "step_0/worker_0.jsonl")
        if line.get("extra", {}).get("request_id") == "g0/0"
    ]
    (complete,) = [line for line in lines if line["event"] == "async_rollout_request_complete"]
    assert complete["duration_sec"] == pytest.approx(50)
    assert [timing["engine_call_duration"] for timing in complete["extra"]["turn_timings"]] == pytest.approx([26, 19])
    calls = [line for line in lines if line["event"] == "turn_engine_call"]
    assert [(line["extra"]["turn"], line["duration_sec"]) for line in calls] == [
        (0, pytest.approx(26)),
        (1, pytest.approx(19)),
    ]
    assert calls[0]["extra"]["generated_tokens"] == 250


def test_a_folder_with_a_log_is_not_written_to(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "logs", [clean_step(random.Random(1), 0, 1, 4)])
    with pytest.raises(InvalidInput, match="has a log already"):
        export_published(load(folder), folder)
