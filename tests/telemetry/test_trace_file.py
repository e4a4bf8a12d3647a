"""The files of a trace: whole lines in segments, for their owner alone, and a disk that is full."""

import logging
import os
import stat
from pathlib import Path

import pytest

from forebay.telemetry.tracing.records import Head, RolloutSummary
from forebay.telemetry.tracing.trace_file import SEGMENT_BYTES, TraceFile, segment_bytes
from tests.kit import poll_until
from tests.telemetry.trace_kit import RUN, kinds, lines_of, make_tracer, of_kind


def make_file(folder: Path, max_bytes: int = SEGMENT_BYTES) -> TraceFile:
    head = Head(version=1, run_id=RUN, process="gateway", start=3, pid=77, wall_ns=10, mono_ns=5)
    return TraceFile(folder, head, max_bytes)


def test_segments_are_numbered_and_each_begins_with_the_head(tmp_path: Path) -> None:
    file = make_file(tmp_path, max_bytes=1_000)
    line = b'{"kind":"x"}' + b" " * 387 + b"\n"
    for _ in range(5):
        file.append(line)
    file.close()
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"gateway-3-77.{number}.jsonl" for number in (1, 2, 3)]
    assert all(path.read_bytes().startswith(b'{"kind":"head","version":1,') for path in paths)
    assert [path.read_bytes().count(b"\n") for path in paths] == [3, 3, 2]
    assert all(path.stat().st_size <= 1_000 for path in paths)


def test_a_segment_has_8_mib_and_less_where_the_budget_is_small() -> None:
    assert segment_bytes(256 << 20) == SEGMENT_BYTES == 8 << 20
    assert segment_bytes(16 << 20) == 1 << 20
    assert segment_bytes(1) == 64 << 10


def test_files_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_file(tmp_path / "run" / "trace").append(b"{}\n")
    finally:
        os.umask(before)
    for path, mode in (("run", 0o700), ("run/trace", 0o700), ("run/trace/gateway-3-77.1.jsonl", 0o600)):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode


def test_a_pid_that_comes_again_overwrites_nothing(tmp_path: Path) -> None:
    """In a container each start has the same."""
    for _ in range(2):
        file = make_file(tmp_path)
        file.append(b'{"kind":"x"}\n')
        file.close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["gateway-3-77.1.jsonl", "gateway-3-77.2.jsonl"]
    assert len(lines_of(tmp_path)) == 4


def test_a_record_is_in_the_file_within_a_second(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    tracer.write(RolloutSummary(t=1, d=1, id="a", uid="uid", group="group", instance=1))
    poll_until(lambda: kinds(tmp_path)["rollout"], timeout_s=30)
    tracer.close()


def test_one_thread_writes_all_traces_of_a_process(tmp_path: Path) -> None:
    tracers = [make_tracer(tmp_path / str(number)) for number in range(5)]
    for tracer in tracers:
        tracer.write(RolloutSummary(t=1, d=1, id="a", uid="uid", group="group", instance=1))
    poll_until(lambda: all(kinds(tmp_path / str(number))["rollout"] for number in range(5)))
    import threading

    assert [thread.name for thread in threading.enumerate()].count("trace") == 1
    for tracer in tracers:
        tracer.close()


def test_a_full_disk_ends_tracing_with_one_warning(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = make_tracer(small_disk / "trace")
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            attempt = tracer.attempt(f"uid-{number}", "group", 0)
            for _ in range(200):
                with attempt.begin("engine", engine="http://engine:1"):
                    pass
            assert sum(attempt.summary(instance=number).phases.values()) > 0
            tracer.flush()
    tracer.close()
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the trace of run-0123456789ab ends here" in warning.getMessage()
    assert "No space left" in warning.getMessage()
    assert 100 < len(lines_of(small_disk / "trace")) < 4_000


def test_a_file_that_may_not_grow_ends_tracing_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace").write_text("no folder")
    tracer = make_tracer(tmp_path / "trace")
    attempt = tracer.attempt("uid", "group", 0)
    attempt.summary(instance=1)
    with caplog.at_level(logging.WARNING):
        poll_until(lambda: caplog.records)
    attempt.summary(instance=1)
    tracer.close()
    assert len(caplog.records) == 1


def test_what_lasts_ten_seconds_is_noted_once_while_it_is_open(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    ten_seconds = 10_000_000_000
    long = attempt.begin("engine", begun=tracer.now() - ten_seconds, turn=4, engine="http://engine:1")
    attempt.begin("tool", begun=tracer.now() - ten_seconds // 2)
    poll_until(lambda: kinds(tmp_path)["open"], timeout_s=30)
    tracer.note_long()
    tracer.flush()
    [note] = of_kind(tmp_path, "open")
    assert (note["name"], note["id"], note["turn"], note["uid"]) == ("engine", long.id, 4, "uid")
    assert (note["t"], note["at"], note["up"]) == (long.begun, {"engine": "http://engine:1"}, attempt.id)
    long.end()
    tracer.close()
    assert {line["id"] for line in of_kind(tmp_path, "span")} == {long.id}


def test_of_groups_that_are_not_kept_no_open_span_is_noted(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path, rate=0.0)
    attempt = tracer.attempt("uid", "group", 0, begun=tracer.now() - 20_000_000_000)
    tracer.note_long()
    attempt.summary(instance=1)
    tracer.close()
    assert kinds(tmp_path) == {"head": 1, "rollout": 1}


def test_whoever_opened_a_span_may_tell_more_of_it(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    attempt = tracer.attempt("uid", "group", 0)
    told = attempt.begin("engine", begun=tracer.now() - 11_000_000_000)
    told.on_open = lambda _: {"load": {"running": 3}}
    failing = attempt.begin("tool", begun=tracer.now() - 11_000_000_000)
    failing.on_open = lambda _: {}["nothing"]
    late = attempt.begin("reward", begun=tracer.now() - 11_000_000_000)
    late.on_open = lambda _: None
    never = attempt.begin("write", begun=tracer.now() - 11_000_000_000)
    never.on_open = lambda _: None
    tracer.note_long()
    late.note_open(load={"running": 4})
    tracer.flush()
    assert {line["name"]: line.get("at") for line in of_kind(tmp_path, "open")} == {
        "engine": {"load": {"running": 3}},
        "tool": None,
        "reward": {"load": {"running": 4}},
    }
    never.begun -= 2_000_000_000
    tracer.note_long()
    tracer.close()
    assert [line["name"] for line in of_kind(tmp_path, "open")][3:] == ["write"]


def test_what_was_let_go_of_is_watched_no_more(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    for number in range(100):
        tracer.attempt(f"uid-{number}", "group", 0, begun=tracer.now() - 20_000_000_000).summary(instance=number)
    tracer.note_long()
    tracer.close()
    assert "open" not in kinds(tmp_path)
