"""verl's profile log: one line an event, by threads and processes at once, and a disk that is full."""

import json
import logging
import threading
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from forebay.telemetry import EventLog
from tests.telemetry.trace_kit import python


def test_a_line_has_the_published_keys_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "experiment" / "step_3" / "worker_0.jsonl"
    log = EventLog()
    log.log(
        path,
        "turn_end",
        duration=1.25,
        extra={"request_id": "r", "turn": 1},
        workid=0,
        step=3,
        finish_reason="stop",
        has_tool_calls=None,
    )
    log.log(str(path), "request_start")
    first, second = path.read_text().splitlines()
    stamp = json.loads(first)["timestamp"]
    assert first == (
        f'{{"timestamp":"{stamp}","event":"turn_end","duration_sec":1.25,'
        '"extra":{"request_id":"r","turn":1},"workid":0,"step":3,"finish_reason":"stop"}'
    )
    assert list(json.loads(second)) == ["timestamp", "event"]
    assert abs(datetime.now() - datetime.fromisoformat(stamp)) < timedelta(minutes=1)


def test_positions_are_those_of_the_original(tmp_path: Path) -> None:
    EventLog().log(tmp_path / "log", "event", 0.5, {"turn": 0}, 7, 1)
    assert list(json.loads((tmp_path / "log").read_text()))[2:] == ["duration_sec", "extra", "workid", "step"]


def test_what_json_does_not_have_is_written_as_text(tmp_path: Path) -> None:
    EventLog().log(tmp_path / "log", "event", extra={"path": Path("/a"), "when": datetime(2026, 1, 1)}, other={1})
    line = json.loads((tmp_path / "log").read_text())
    assert line["extra"] == {"path": "/a", "when": "2026-01-01T00:00:00"}
    assert line["other"] == [1]


def test_two_threads_of_two_processes_write_into_one_file(tmp_path: Path) -> None:
    program = f"""
import os, threading
from forebay.telemetry import EventLog
log = EventLog()
path = {str(tmp_path / "log")!r}
log.log(path, "begun")
child = os.fork()
def work(thread):
    for number in range(300):
        log.log(path, "event", extra={{"text": "x" * number * 50}}, workid=thread, step=number, of=int(child == 0))
threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
if child:
    os.waitpid(child, 0)
"""
    process = python(program)
    process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert Counter((line["workid"], line["of"]) for line in lines[1:]) == dict.fromkeys(
        [(0, 0), (0, 1), (1, 0), (1, 1)], 300
    )


def test_a_fork_while_a_thread_writes_hangs_nobody(tmp_path: Path) -> None:
    program = f"""
import os, threading
from forebay.telemetry import EventLog
log = EventLog()
path = {str(tmp_path / "log")!r}
def work():
    for _ in range(3_000):
        log.log(path, "event")
thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    if (child := os.fork()) == 0:
        log.log(path, "child")
        os._exit(0)
    os.waitpid(child, 0)
thread.join()
"""
    process = python(program)
    process.communicate(timeout=60)
    assert process.returncode == 0
    events = Counter(json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines())
    assert events == {"event": 3_000, "child": 20}


def test_a_full_disk_warns_once_and_leaves_whole_lines(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.WARNING):
        for number in range(2_000):
            log.log(small_disk / "log", "event", extra={"text": "x" * 100}, step=number)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text or "part of a line" in caplog.text
    text = (small_disk / "log").read_text()
    assert text.endswith("\n")
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(text.count("\n")))


def test_what_cannot_be_written_costs_its_caller_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("not shown")

    (tmp_path / "file").write_text("")
    log = EventLog()
    with caplog.at_level(logging.WARNING):
        log.log(tmp_path / "file" / "log", "event")
        log.log(tmp_path / "log", "event", extra={"broken": Broken(), "number": 1})
        log.log(tmp_path / "log", "event")
    assert len(caplog.records) == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_threads_that_begin_together_open_a_file_once(tmp_path: Path) -> None:
    log = EventLog()
    threads = [threading.Thread(target=log.log, args=(tmp_path / "a" / "b" / "log", "event")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "a" / "b" / "log").read_text().splitlines()) == 8


def test_a_long_training_has_no_files_open(tmp_path: Path) -> None:
    log = EventLog()
    for step in range(300):
        log.log(tmp_path / f"step_{step}" / "worker_0.jsonl", "total_step_duration", duration=1.0, step=step)
    assert [file for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)] == []
    log.log(tmp_path / "step_0" / "worker_0.jsonl", "barrier_wait_duration", duration=1.0, step=0)
    assert len((tmp_path / "step_0" / "worker_0.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "step_299" / "worker_0.jsonl").is_file()
