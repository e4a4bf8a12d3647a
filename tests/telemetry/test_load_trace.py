"""From record files with planted truth to steps; ``test_load_trace_requests.py`` has their requests."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis import load
from tests.telemetry.planted_trace import PlantedTrace, one_group, seconds, window


@pytest.fixture
def trace(tmp_path: Path) -> PlantedTrace:
    return PlantedTrace(tmp_path / "trace")


def test_a_step_goes_from_the_last_byte_before_it_to_its_own(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 1, 10)
    one_group(run, server, "b", 2, 20)
    server.read(3, 10, 11, ["a"], step=0, judged=10.25, first_byte=10.5)
    server.read(15, 20, 22, ["b"], step=1, by="b", weights=3)
    first, second = trace.steps()
    assert (first.name, window(first)) == ("0", (1, 11))
    assert (second.name, window(second)) == ("1", (11, 22))
    assert second.asked_s is not None
    assert second.satisfied_s is not None
    assert (seconds(second.asked_s), seconds(second.satisfied_s)) == pytest.approx((15, 20))
    assert second.released_by == "b"
    assert [request.request_id for request in second.requests] == ["b/0", "b/1"]
    assert second.ready_by == {"b": "b/1"}
    assert first.delivery_phases == pytest.approx({"hooks": 0.25, "write": 0.0, "delivery": 0.75}, abs=1e-6)


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ({"step": 5, "weights": 1}, ["5"]),
        ({"weights": 1}, ["1"]),
        ({}, ["0", "1"]),
    ],
)
def test_a_step_is_what_the_reads_tell(trace: PlantedTrace, told: dict[str, int], names: list[str]) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 1, 10)
    one_group(run, server, "b", 2, 20)
    server.read(3, 10, 11, ["a"], **told)
    server.read(15, 20, 22, ["b"], **told)
    assert [step.name for step in trace.steps()] == names


def test_a_checkpoint_makes_a_step_where_reads_tell_none(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for number, group in enumerate("abc"):
        one_group(run, server, group, 10 * number + 1, 10 * number + 9)
        server.read(10 * number + 2, 10 * number + 9, 10 * number + 10, [group], batch=f"batch-{group}", weights=number)
    server.batch("batch-a", 25, 40)
    server.batch("batch-b", 25, 40)
    steps = trace.steps()
    assert [step.name for step in steps] == ["40", "read 2"]
    assert [len(step.requests) for step in steps] == [4, 2]


def test_ranks_that_read_one_step_make_one_step(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for group in "abcd":
        one_group(run, server, group, 1, 10)
    server.read(2, 10, 11, ["a"], step=0)
    server.read(2, 10, 12, ["b"], step=0)
    server.read(13, 14, 15, ["c"], step=1)
    server.read(12, 14, 16, ["d"], step=1)
    first, second = trace.steps()
    assert (window(first), window(second)) == ((1, 12), (12, 16))
    assert [len(step.reads) for step in (first, second)] == [2, 2]


def test_a_step_that_is_trained_again_after_a_rewind_is_another(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for number, group in enumerate("ab"):
        one_group(run, server, group, 10 * number + 1, 10 * number + 9)
        server.read(10 * number + 2, 10 * number + 9, 10 * number + 10, [group], step=number)
    server.read(30, 31, 32, ["b"], step=1)
    server.read(40, 41, 42, ["a"], step=2)
    steps = trace.steps()
    assert [step.name for step in steps] == ["0", "1", "1 (2)", "2"]
    assert [len(step.requests) for step in steps] == [2, 2, 0, 0]


def test_a_read_that_brought_nothing_makes_no_step(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 1, 10)
    server.read(2, 10, 11, ["a"], step=0)
    server.read(12, 12, 13, [], step=1, worst="timeout")
    assert [step.name for step in trace.steps()] == ["0"]


def test_what_was_given_up_belongs_to_the_step_in_which_it_was(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 1, 10)
    run.rollout("x/0", 2, 9, ending="aborted")
    server.group("x", "discarded", 9, reason="surplus")
    one_group(run, server, "b", 12, 20)
    run.rollout("y/0", 12, 19, ending="aborted")
    server.group("y", "discarded", 19, reason="surplus")
    server.read(2, 10, 11, ["a"], step=0)
    server.read(15, 20, 22, ["b"], step=1)
    used = [{request.request_id: request.is_used for request in step.requests} for step in trace.steps()]
    assert used == [{"a/0": True, "a/1": True, "x/0": False}, {"b/0": True, "b/1": True, "y/0": False}]


def test_groups_that_nobody_read_belong_to_no_step_and_that_is_noted(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 1, 10)
    one_group(run, server, "b", 1, 5)
    server.read(2, 10, 11, ["a"], step=0)
    timeline = load(trace.folder)
    assert [len(step.requests) for step in timeline.steps()] == [2]
    assert timeline.notes == ["2 requests of 1 groups ended after the last read: they belong to no step."]


def test_a_wall_clock_that_was_set_between_two_processes_moves_nothing(trace: PlantedTrace) -> None:
    run, server = trace.file("run", boot="one"), trace.file("server", pid=9, begun=1, wall_off=-30, boot="one")
    one_group(run, server, "a", 2, 10)
    server.read(3, 10, 11, ["a"], step=0)
    server.stall(4, 6, ["main.py:7 main"])
    timeline = load(trace.folder)
    (step,) = timeline.steps()
    assert window(step) == (2, 11)
    assert seconds(step.ready_s["a"]) == pytest.approx(10)
    assert seconds(step.standstills[0].begin_s) == pytest.approx(4)


def test_a_reboot_is_no_setting_of_the_clock(tmp_path: Path) -> None:
    trace = PlantedTrace(tmp_path)
    run = trace.file("run")
    run.rollout("a/0", 0, 10)
    later = trace.file("run", start=2, pid=3, begun=0, wall_off=20_000)
    later.rollout("b/0", 0, 10)
    (step,) = trace.steps()
    assert [round(seconds(request.begin_s)) for request in step.requests] == [0, 20_000]


def test_a_run_that_goes_on_on_another_machine_keeps_its_times(trace: PlantedTrace) -> None:
    run = trace.file("run", boot="one")
    run.rollout("a/0", 0, 10)
    # This machine has been up for longer than the first one.
    later = trace.file("run", start=2, pid=3, begun=0, wall_off=500, boot="another")
    later.rollout("b/0", 0, 10)
    (step,) = trace.steps()
    assert [round(seconds(request.begin_s)) for request in step.requests] == [0, 500]


def test_a_trace_of_many_short_processes_needs_few_open_files(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 0, 10)
    server.read(1, 10, 11, ["a"], step=0)
    for pid in range(100, 400):
        trace.file("run", pid=pid).span("compile", 2, 3, "a/0", group="a")
    before = len(os.listdir("/proc/self/fd"))
    timeline = load(trace.folder)
    (step,) = timeline.steps()
    assert sum(event.name == "compile" for event in step.requests[0].events) == 300
    assert len(os.listdir("/proc/self/fd")) - before < 20


def test_a_standstill_is_known_with_its_stack(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 0, 10)
    one_group(run, server, "b", 20, 30)
    run.stall(3, 4, ["gen.py:12 reward"], has_ended=False)
    run.stall(3, 8, ["gen.py:12 reward"])
    server.read(1, 10, 11, ["a"], step=0)
    server.read(12, 30, 31, ["b"], step=1)
    first, second = trace.steps()
    assert [(stall.process, stall.stack) for stall in first.standstills] == [("run", ["gen.py:12 reward"])]
    assert first.standstills[0].end_s - first.standstills[0].begin_s == pytest.approx(5)
    assert second.standstills == []


def test_an_engine_stands_at_the_barrier_unless_it_serves_others(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    for group, engine, end in (("a", "e1", 10.0), ("b", "e2", 30.0), ("c", "e3", 12.0)):
        run.rollout(f"{group}/0", 0, end, engine=engine)
        server.group(group, "ready", end, last=f"{group}/0")
    run.rollout("next/0", 15, 25, engine="e1")
    server.group("next", "open", 15)
    server.read(1, 35, 36, ["a", "b", "c"], step=0)
    (step,) = trace.steps()
    barrier = {worker: round(phases["barrier_wait"], 6) for worker, phases in step.worker_phases.items()}
    assert barrier == {"e1": 10, "e2": 0, "e3": 18}


def test_broken_lines_and_impossible_times_are_named_and_left_out(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 0, 10)
    run.write_line(b"{not json\n")
    run.write_line(b'{"kind":"span","name":"tool","t":-5,"d":3,"id":"00"}\n')
    run.write_line(b'{"kind":"span","name":"tool","t":5,"d":-3,"id":"00"}\n')
    run.write_line(b'{"kind":"span","name":"tool","t":NaN,"d":3,"id":"00"}\n')
    run.write_line(b"\xff\xfe\n")
    server.read(1, 10, 11, ["a"], step=0)
    run.write_line(b'{"kind":"span","name":"to')
    timeline = load(trace.folder)
    (step,) = timeline.steps()
    assert len(step.requests) == 2
    assert timeline.problems.number == 6
    assert [problem.line for problem in timeline.problems.first] == [4, 5, 6, 7, 8, 9]
    assert {Path(problem.file).name for problem in timeline.problems.first} == {"run-1-7.0.jsonl"}
    assert all(problem.what for problem in timeline.problems.first)


def test_of_many_broken_lines_a_hundred_are_named_and_all_counted(trace: PlantedTrace) -> None:
    run = trace.file("run")
    run.rollout("a/0", 0, 10)
    run.write_line(b"{}\n" * 250)
    timeline = load(trace.folder)
    assert (len(timeline.problems.first), timeline.problems.number) == (100, 250)


def test_dropped_spans_are_noted(trace: PlantedTrace) -> None:
    run = trace.file("run")
    run.rollout("a/0", 0, 10)
    run.dropped(5, 70, "queue full")
    run.dropped(6, 5, "queue full")
    assert "75 spans and 0 summaries are missing (queue full)." in load(trace.folder).notes


def test_rollouts_of_a_discarded_group_are_not_used_before_the_first_read(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server", pid=8)
    run.rollout("a/0", 3, 10)
    run.rollout("b/0", 4, 14)
    server.group("a", "discarded", 11, reason="invalid")
    (step,) = load(trace.folder).steps()
    assert [(each.is_used, each.discarded) for each in step.requests] == [(False, "invalid"), (True, "")]


def test_without_reads_all_is_one_step_and_that_is_said(trace: PlantedTrace) -> None:
    run = trace.file("run")
    run.rollout("a/0", 3, 10)
    run.rollout("b/0", 4, 14)
    timeline = load(trace.folder)
    (step,) = timeline.steps()
    assert (step.name, window(step), step.is_open) == ("0", (3, 14), False)
    assert [request.is_used for request in step.requests] == [True, True]
    assert timeline.notes == ["No read delivered anything: all is one step, from the first start to the last end."]


def test_a_stream_is_the_same_as_its_files(trace: PlantedTrace) -> None:
    run, server = trace.file("run"), trace.file("server")
    one_group(run, server, "a", 0, 10)
    run.span("tool", 1, 2, "a/0", group="a")
    server.read(1, 10, 11, ["a"], step=0)

    def lines() -> Iterator[bytes]:
        for path in sorted(trace.folder.iterdir()):
            yield from path.read_bytes().splitlines(keepends=True)

    assert list(load(lines()).steps()) == trace.steps()
    assert list(load([line.decode().rstrip() for line in lines()]).steps()) == trace.steps()


def test_parts_of_a_trace_may_lie_in_several_folders(tmp_path: Path) -> None:
    here, there = PlantedTrace(tmp_path / "here"), PlantedTrace(tmp_path / "there")
    run, server = here.file("run"), there.file("server")
    one_group(run, server, "a", 0, 10)
    server.read(1, 10, 11, ["a"], step=0)
    (step,) = load(here.folder, str(there.folder)).steps()
    assert [request.request_id for request in step.requests] == ["a/0", "a/1"]


def test_a_file_of_reads_that_was_copied_makes_no_steps_of_its_own(tmp_path: Path) -> None:
    trace = PlantedTrace(tmp_path)
    one_group(trace.file("run"), server := trace.file("server"), "a", 1, 10)
    server.read(2, 10, 11, ["a"])
    shutil.copy(server.path, tmp_path / "server-1-7.9.jsonl")
    assert [step.name for step in trace.steps()] == ["0"]


def test_groups_of_which_no_process_wrote_a_line_have_their_reads(trace: PlantedTrace) -> None:
    server = trace.file("server")
    server.group("a", "open", 1)
    server.group("a", "ready", 10)
    server.read(2, 10, 11, ["a"])
    (step,) = trace.steps()
    assert (step.requests, len(step.reads), window(step)) == ([], 1, (2, 11))


def test_a_run_folder_is_as_good_as_its_trace(tmp_path: Path) -> None:
    PlantedTrace(tmp_path / "trace").file("run").rollout("a/0", 0, 10)
    assert len(list(load(str(tmp_path)).steps())) == 1


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_log_it_says_what_was_looked_for(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "nothing"
    if is_there:
        folder.mkdir()
        (folder / "notes.txt").write_text("hello")
    with pytest.raises(InvalidInput, match=re.escape(str(folder))) as caught:
        load(folder)
    assert "{run,gateway,server}-*.jsonl" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_stream_without_a_record_is_no_trace() -> None:
    with pytest.raises(InvalidInput, match="contains no trace records"):
        load([b"<html>"])
