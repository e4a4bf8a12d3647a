"""verl's profile log, in every spelling, is read as steps with their requests."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.telemetry import EventLog
from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.intervals import covered
from forebay.telemetry.analysis.timeline import ProfileStep, Request
from tests.telemetry.planted_log import MOMENT_S, clean_step, iso, write_log

WORKER_EVENTS = [
    "preprocessing_duration",
    "async_generate_duration",
    "sorting_duration",
    "barrier_wait_duration",
    "broadcast_duration",
    "data_extraction_duration",
    "padding_duration",
    "concatenation_duration",
    "batch_construction_duration",
    "cache_flush_duration",
    "final_construction_duration",
    "engine_async_generate",
    "barrier",
    "reward_duration",
    "async_rollout_with_monitoring_duration",
    "my_phase",
]
REQUEST_EVENTS = [
    "pending_state_handling",
    "tool_creation_pending_state",
    "interaction_start_pending_state",
    "tool_execution",
    "tool_response_processing",
    "tool_calling_state",
    "turn_pre_process",
    "engine_generate_setup",
    "engine_async_generate_actual",
    "turn_engine_call",
    "turn_tool_parsing",
    "turn_post_process",
    "interaction_response",
    "interacting_state",
    "reward_calculation",
    "finalization",
    "my_phase",
]
NAMES_IN_REPORTS = {
    "engine_async_generate_actual": "engine",
    "turn_engine_call": "engine",
    "tool_execution": "tool",
    "reward_calculation": "reward",
    "reward_duration": "reward",
    "barrier": "barrier_wait",
    "async_rollout_with_monitoring_duration": "async_generate",
}
Write = Callable[..., Path]


def line(event: str, end_s: float, duration: float | None = None, **more: Any) -> dict[str, Any]:
    named: dict[str, Any] = {"timestamp": iso(MOMENT_S + end_s), "event": event}
    if duration is not None:
        named["duration_sec"] = duration
    return named | more


def of_request(event: str, end_s: float, duration: float | None = None, **extra: Any) -> dict[str, Any]:
    return line(event, end_s, duration, extra={"request_id": "r1", **extra}, workid=0, step=1)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_lines(*lines: dict[str, Any] | str, name: str = "step_1/worker_0.jsonl") -> Path:
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
        return tmp_path / "logs"

    return write_lines


def only_step(folder: Path) -> ProfileStep:
    (step,) = load(folder).steps()
    return step


def only_request(folder: Path) -> Request:
    (request,) = only_step(folder).requests
    return request


@pytest.mark.parametrize("event", WORKER_EVENTS)
def test_each_event_of_a_worker_is_a_phase_with_its_share(write: Write, event: str) -> None:
    folder = write(
        line("sorting_duration" if event != "sorting_duration" else "padding_duration", 1, 1.0, workid=0),
        line(event, 4, 3.0, workid=0),
        line("total_step_duration", 4, 4.0, workid=0),
    )
    report = analyse(load(folder))
    assert report.phase_shares[NAMES_IN_REPORTS.get(event, event.removesuffix("_duration"))] == pytest.approx(75)
    assert sum(report.phase_shares.values()) == pytest.approx(100)


@pytest.mark.parametrize("event", REQUEST_EVENTS)
def test_each_event_of_a_request_is_a_phase_of_its_own(write: Write, event: str) -> None:
    request = only_request(
        write(
            of_request("request_start", 0, initial_prompt_length=7),
            of_request("turn_start", 0, turn=0),
            of_request(event, 3, 3.0, turn=0),
            of_request("turn_end", 4, 4.0, turn=0),
            of_request("main_loop", 4, 4.0),
            of_request("async_rollout_request_complete", 4, 4.0),
        )
    )
    assert request.phases == pytest.approx({NAMES_IN_REPORTS.get(event, event): 3.0, "agent": 1.0})
    assert [(part.name, part.turn) for part in request.events] == [
        (NAMES_IN_REPORTS.get(event, event), 0),
        ("agent", 0),
    ]
    assert request.duration_s == pytest.approx(4)


@pytest.mark.parametrize("event", ["request_start", "turn_start", "turn_end", "main_loop", "total_step_duration"])
def test_what_only_holds_others_is_no_phase(write: Write, event: str) -> None:
    duration = None if event.endswith("_start") else 4.0
    folder = write(
        of_request(event, 4, duration, turn=0) if event != "total_step_duration" else line(event, 4, 4.0),
        of_request("turn_engine_call", 4, 4.0, turn=0),
    )
    assert only_request(folder).phases == pytest.approx({"engine": 4.0})


def test_a_part_of_an_event_counts_once_and_as_itself(write: Write) -> None:
    request = only_request(
        write(
            of_request("turn_start", 0, turn=0),
            of_request("engine_generate_setup", 1, 1.0),
            of_request("engine_async_generate_actual", 9, 7.0),
            of_request("turn_engine_call", 10, 10.0, turn=0, generated_tokens=70),
            of_request("turn_tool_parsing", 10.5, 0.5, turn=0),
            of_request("turn_post_process", 12, 2.0, turn=0, has_tool_calls=True, finish_reason="tool"),
            of_request("tool_execution", 15, 3.0, turn=1),
            of_request("tool_calling_state", 16, 4.0, turn=1),
            of_request("async_rollout_request_complete", 16, 16.0),
        )
    )
    expected = {"engine_generate_setup": 1.0, "engine": 9.0, "turn_tool_parsing": 0.5, "turn_post_process": 1.5}
    assert request.phases == pytest.approx(expected | {"tool": 3.0, "tool_calling_state": 1.0})
    (turn,) = request.turns
    assert (turn.sampled_tokens, turn.has_tools, turn.finish_reason) == (70, True, "tool")
    assert turn.phases == pytest.approx(request.phases)


def test_an_event_of_ones_own_counts_where_nothing_lies_inside_it(write: Write) -> None:
    request = only_request(
        write(
            of_request("my_call", 8, 2.0),
            of_request("tool_execution", 9, 4.0, turn=0),
            of_request("my_rollout", 12, 12.0),
            of_request("async_rollout_request_complete", 12, 12.0),
        )
    )
    assert request.phases == pytest.approx({"my_call": 2.0, "tool": 2.0, "my_rollout": 8.0})


@pytest.mark.parametrize("seed", range(20))
def test_phases_and_events_add_up_to_the_request_however_its_lines_overlap(write: Write, seed: int) -> None:
    rng = random.Random(seed)
    lines = [of_request("async_rollout_request_complete", 20, 20.0)]
    for _ in range(12):
        lasts = round(rng.uniform(0, 8), 6)
        end_s = round(rng.uniform(-1, 24), 6)
        lines.append(of_request(rng.choice(REQUEST_EVENTS), end_s, lasts, turn=rng.randrange(3)))
    request = only_request(write(*lines))
    assert sum(request.phases.values()) == pytest.approx(20)
    assert covered((event.begin_s, event.end_s) for event in request.events) == pytest.approx(20)
    assert all(request.begin_s <= event.begin_s < event.end_s <= request.end_s for event in request.events)
    by_turns = sum(seconds for turn in request.turns for seconds in turn.phases.values())
    first_s = min((turn.begin_s for turn in request.turns), default=request.end_s)
    assert by_turns == pytest.approx(request.end_s - max(first_s, request.begin_s), abs=1e-5)


def test_between_turns_nobody_measured_it_is_the_tool_or_the_agent(write: Write) -> None:
    request = only_request(
        write(
            of_request("turn_engine_call", 2, 2.0, turn=0),
            of_request("turn_post_process", 3, 1.0, turn=0, has_tool_calls=True),
            of_request("turn_start", 8, turn=1),
            of_request("turn_engine_call", 10, 2.0, turn=1),
            of_request("async_rollout_request_complete", 11, 11.0),
        )
    )
    assert request.phases == pytest.approx({"engine": 4.0, "turn_post_process": 1.0, "tool": 5.0, "agent": 1.0})


def test_turns_come_from_their_timings_where_only_ends_are_logged(write: Write) -> None:
    parts = {"pre_process_duration": 1.0, "engine_call_duration": 6.0, "post_process_duration": 1.0}
    timings = [
        {"turn": 1, "total_duration": 8.0, **parts, "tool_parsing_duration": 0.1, "has_tool_calls": True},
        {"turn": 2, "total_duration": 8.0, **parts, "has_tool_calls": False, "finish_reason": "LENGTH"},
    ]
    complete = of_request(
        "async_rollout_request_complete", 16, 16.0, turn_timings=timings, actual_response_tokens=900, turns=2
    )
    request = only_request(write(complete))
    assert [(turn.number, turn.end_s - turn.begin_s) for turn in request.turns] == [(0, 8.0), (1, 8.0)]
    assert [turn.phases["engine"] for turn in request.turns] == pytest.approx([6, 6])
    assert request.phases == pytest.approx({"engine": 12, "turn_pre_process": 2, "turn_post_process": 2})
    assert (request.is_capped, request.sampled_tokens) == (True, 900)
    assert [(event.name, event.turn) for event in request.events if event.name == "engine"] == [
        ("engine", 0),
        ("engine", 1),
    ]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("depth", ["", "exp", "exp/seed1", "a/b/c"])
def test_steps_are_found_at_any_depth_and_from_any_number(tmp_path: Path, first: int, depth: str) -> None:
    rng = random.Random(1)
    steps = [clean_step(rng, place, 1, 4) for place in range(11)]
    write_log(tmp_path / depth, steps, first=first)
    names = [step.name for step in load(tmp_path).steps()]
    assert names == [str(number) for number in range(first, first + 11)]


def test_steps_may_be_called_global_and_files_may_be_compressed(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    whole = (json.dumps(line("async_rollout_request_complete", 3, 3.0, request_id="r1")) + "\n").encode()
    (folder / "worker_2.jsonl.gz").write_bytes(gzip.compress(whole))
    (folder / "worker_3.jsonl.gz").write_bytes(gzip.compress(whole * 1000)[:-12])
    timeline = load(tmp_path)
    (step,) = timeline.steps()
    assert step.name == "7"
    assert "2" in {request.worker for request in step.requests}
    (problem,) = timeline.problems.first
    assert Path(problem.file).name == "worker_3.jsonl.gz"
    assert "cannot be decompressed" in problem.what


def test_an_id_that_ended_at_two_workers_is_two_requests(write: Write) -> None:
    lines = [line("async_rollout_request_complete", 3 + at, 2.0, request_id="0", worker=at) for at in (0, 1)]
    folder = write(*lines, line("reward_calculation", 9, 1.0, request_id="0", worker=-1))
    assert {(each.request_id, each.worker) for each in only_step(folder).requests} == {("0/0", "0"), ("1/0", "1")}


def test_deeper_than_three_there_is_no_log(tmp_path: Path) -> None:
    write_log(tmp_path / "a/b/c/d", [clean_step(random.Random(1), 0, 1, 4)])
    with pytest.raises(InvalidInput, match=r"no log in .*step_\*/worker_\*\.jsonl"):
        load(tmp_path)


def test_logs_of_two_experiments_are_not_mixed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_log(tmp_path / name, [clean_step(random.Random(1), 0, 1, 4)])
    with pytest.raises(InvalidInput, match="several experiments: first, second"):
        load(tmp_path)


def test_other_spellings_of_ids_and_workers_are_the_same(write: Write) -> None:
    plain = write(
        line("turn_engine_call", 2, 2.0, extra={"request_id": "r1", "turn": 0, "generated_tokens": 5}, workid=3),
        line("async_rollout_request_complete", 3, 3.0, extra={"request_id": "r1"}, workid=3),
    )
    later = write(
        line("turn_engine_call", 2, 2.0, request_id="r1", turn=0, generated_tokens=5, worker="worker_3"),
        line("async_rollout_request_complete", 3, 3.0, request_id="r1", worker=3),
        name="../later/step_1/anything.jsonl",
    )
    assert only_request(plain) == only_request(later.parent / "later")
    assert only_request(plain).worker == "3"


def test_a_worker_is_its_files_where_lines_do_not_say_and_the_driver_is_one(write: Write) -> None:
    write(line("async_generate_duration", 3, 3.0), name="step_1/worker_5.jsonl")
    folder = write(line("reward_duration", 4, 1.0), name="step_1/worker_-1.jsonl")
    assert only_step(folder).worker_phases == {"5": {"async_generate": 3.0}, "-1": {"reward": 1.0}}


def test_the_four_lines_of_over_sampling_are_one_abort(write: Write) -> None:
    monitoring = {"total_requests": 2, "target_completion": 1, "completed_count": 1}
    aborted = {"request_id": "r7"}
    folder = write(
        line("aborted_request_with_cancelled_error", 84.51, 90.0, extra=aborted, workid=0),
        line("aborted_request_with_cancelled_error_padding", 84.5125, 0.0025, extra=aborted, workid=0),
        line("aborted_request_with_cancelled_error", 84.51, 90.0, extra=aborted, workid=0),
        line("async_rollout_with_monitoring_duration", 84.51, 84.51, extra=monitoring, workid=0),
        line("async_rollout_request_complete", 80.0, 80.0, extra={"request_id": "r1"}, workid=0),
    )
    (summary,) = analyse(load(folder)).steps
    assert (summary.num_requests, summary.num_used, summary.thrown_requests) == (2, 1, 1)
    assert summary.thrown_s == pytest.approx(84.51)
    assert summary.phase_shares == pytest.approx({"async_generate": 100.0})


@pytest.mark.parametrize("event", ["aborted_request", "aborted_request_with_exception"])
def test_other_names_of_aborts_are_aborts(write: Write, event: str) -> None:
    folder = write(of_request("turn_start", 0, turn=0), of_request(event, 5, 5.0))
    request = only_request(folder)
    assert (request.ending, request.is_used, request.duration_s) == ("aborted", False, pytest.approx(5))


def test_a_request_without_an_end_is_open_where_others_have_one(write: Write) -> None:
    hung = line("turn_engine_call", 9, 1.0, extra={"request_id": "r2", "turn": 0})
    step = only_step(write(of_request("async_rollout_request_complete", 4, 4.0), hung))
    assert {request.request_id: request.ending for request in step.requests} == {"r1": "finished", "r2": "open"}


def test_without_a_total_it_is_from_the_first_start_to_the_last_end_and_that_is_said(write: Write) -> None:
    folder = write(line("async_generate_duration", 30, 25.0), line("barrier_wait_duration", 42, 12.0))
    report = analyse(load(folder))
    assert report.steps[0].seconds == pytest.approx(37)
    assert report.notes == [
        "1 of 1 steps have no total_step_duration in the log: each is counted from its first start to its last end."
    ]


def test_broken_lines_and_wrong_times_are_left_out_counted_and_named(write: Write) -> None:
    good = line("async_generate_duration", 5, 5.0)
    folder = write(
        good,
        '{"timestamp": "2025-06-15T15:06:40", "event": "padding_dur',
        line("padding_duration", 5, -1.0),
        line("padding_duration", 5, float("nan")),
        line("padding_duration", 5, float("inf")),
        line("padding_duration", 5, 1.0) | {"timestamp": "yesterday"},
        {"timestamp": iso(MOMENT_S), "duration_sec": 1.0},
        "[1, 2]",
        line("padding_duration", 5) | {"duration_sec": "long"},
        "",
        good | {"event": "sorting_duration"},
    )
    report = analyse(load(folder))
    file = folder / "step_1/worker_0.jsonl"
    assert report.num_problems == 8
    assert [problem.split(": ", 1)[0] for problem in report.problems] == [f"{file}:{number}" for number in range(2, 10)]
    assert [problem.split(": ", 1)[1] for problem in report.problems] == [
        "not a complete line of JSON",
        "duration_sec is out of range: -1.0",
        "duration_sec is out of range: nan",
        "duration_sec is out of range: inf",
        "timestamp must be an ISO time (got 'yesterday')",
        "has no event name",
        "not an object",
        "duration_sec must be a number (got 'long')",
    ]
    assert set(report.phase_shares) == {"async_generate", "sorting"}


def test_of_many_broken_lines_a_hundred_are_named(write: Write) -> None:
    report = analyse(load(write(*["{"] * 250, line("async_generate_duration", 5, 5.0))))
    assert (report.num_problems, len(report.problems)) == (250, 100)


def test_lengths_that_are_told_for_the_step_alone_count(write: Write) -> None:
    stats = {"response_lengths": [100, 300, 1000, 1000], "response_length_max": 1000, "batch_size": 4}
    folder = write(line("async_generate_duration", 5, 5.0), line("step_response_length_stats", 5, extra=stats))
    (summary,) = analyse(load(folder)).steps
    assert (summary.length_min, summary.length_mean, summary.length_max) == (100, 600, 1000)


def test_what_an_event_log_writes_is_read(tmp_path: Path) -> None:
    log = EventLog()
    path = tmp_path / "logs/run1/step_3/worker_0.jsonl"
    log.log(path, "turn_start", extra={"request_id": "r1", "turn": 0}, workid=0, step=3)
    log.log(path, "turn_engine_call", duration=2.0, extra={"request_id": "r1", "turn": 0}, workid=0, step=3)
    log.log(path, "async_rollout_request_complete", duration=2.5, extra={"request_id": "r1"}, workid=0, step=3, mine=1)
    (step,) = load(tmp_path).steps()
    (request,) = step.requests
    assert (step.name, request.worker) == ("3", "0")
    assert request.phases["engine"] == pytest.approx(2.0, abs=0.1)
    assert request.duration_s == pytest.approx(2.5)


def test_only_one_step_is_held_at_a_time(tmp_path: Path) -> None:
    rng = random.Random(1)
    write_log(tmp_path, [clean_step(rng, place, 1, 4) for place in range(3)])
    steps = load(tmp_path).steps()
    next(steps)
    for number in (2, 3):
        (tmp_path / f"step_{number}/worker_0.jsonl").write_text("")
    assert list(steps) == []
