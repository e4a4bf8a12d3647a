"""The budget of a trace: the oldest spans go first, summaries last, and all that went is counted."""

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from forebay.telemetry.tracing.records import Head, RolloutSummary, Span
from forebay.telemetry.tracing.trace_budget import Removed, enforce_budget
from tests.kit import poll_until
from tests.telemetry.trace_kit import RUN, environment, kinds, make_tracer, of_kind, python, whole_lines


def make_segment(folder: Path, number: int, *, pid: int = 7, num_spans: int = 90, num_rollouts: int = 10) -> Path:
    """One that a process has ended; ``number`` seconds after the others."""
    path = folder / f"run-1-{pid}.{number}.jsonl"
    head = Head(version=1, run_id=RUN, process="run", start=1, pid=pid, wall_ns=number, mono_ns=1)
    spans = [Span(name="engine", t=number, d=5, id=f"{n:016x}", at={"engine": "x" * 100}) for n in range(num_spans)]
    rollouts = [
        RolloutSummary(t=number, d=5, id="a", uid=f"uid-{n}", group="group", instance=1) for n in range(num_rollouts)
    ]
    path.write_bytes(msgspec.json.Encoder().encode_lines([head, *spans, *rollouts]))
    path.chmod(0o600)
    os.utime(path, (1_000 + number, 1_000 + number))
    return path


def kinds_of(path: Path) -> list[str]:
    return sorted({json.loads(line)["kind"] for line in path.read_text().splitlines()})


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_fits_stays_as_it_is(tmp_path: Path) -> None:
    path = make_segment(tmp_path, 1)
    before = path.read_bytes()
    assert enforce_budget(tmp_path, len(before)) == Removed()
    assert path.read_bytes() == before
    assert enforce_budget(tmp_path / "nowhere", 5) == Removed()


def test_the_spans_of_the_oldest_segment_go_first_over_all_processes(tmp_path: Path) -> None:
    newest, oldest, middle = (make_segment(tmp_path, number, pid=number) for number in (3, 1, 2))
    before = size_of(tmp_path)
    removed = enforce_budget(tmp_path, before - 100)
    assert (removed.spans, removed.summaries) == (90, 0)
    assert removed.num_bytes == before - size_of(tmp_path)
    assert kinds_of(oldest) == ["dropped", "head", "rollout"]
    assert kinds_of(middle) == kinds_of(newest) == ["head", "rollout", "span"]
    assert [(line["spans"], line["why"]) for line in of_kind(tmp_path, "dropped")] == [(90, "budget")]
    assert stat.S_IMODE(oldest.stat().st_mode) == 0o600
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".jsonl"]


def test_all_spans_go_before_any_summary(tmp_path: Path) -> None:
    for number in range(4):
        make_segment(tmp_path, number)
    removed = enforce_budget(tmp_path, 6_000)
    assert (removed.spans, removed.summaries) == (360, 0)
    assert kinds(tmp_path) == {"head": 4, "dropped": 4, "rollout": 40}
    removed = enforce_budget(tmp_path, 4_000)
    assert removed.spans == 0
    assert removed.summaries in (10, 20, 30)
    dropped = of_kind(tmp_path, "dropped")
    assert sum(line["spans"] for line in dropped) == 360
    assert sum(line.get("summaries", 0) for line in dropped) == removed.summaries
    assert dropped[0]["summaries"] == 10
    assert "summaries" not in dropped[-1]
    assert size_of(tmp_path) <= 4_000


def test_with_a_budget_of_nothing_spans_go_and_summaries_stay(tmp_path: Path) -> None:
    make_segment(tmp_path, 1)
    assert enforce_budget(tmp_path, 0)[:2] == (90, 0)
    assert enforce_budget(tmp_path, 0) == Removed()
    assert kinds(tmp_path) == {"head": 1, "dropped": 1, "rollout": 10}


def test_a_segment_that_has_no_spans_left_is_not_read_again(tmp_path: Path) -> None:
    path = make_segment(tmp_path, 1)
    enforce_budget(tmp_path, 1_000)
    before = path.stat().st_ino
    enforce_budget(tmp_path, path.stat().st_size)
    assert path.stat().st_ino == before


def test_what_a_living_process_writes_is_not_touched(tmp_path: Path) -> None:
    program = """
from forebay.telemetry import span
for _ in range(1_000):
    with span("x"): pass
input()
"""
    import subprocess

    process = python(program, env=environment(tmp_path), stdin=subprocess.PIPE)
    [path] = poll_until(lambda: list(tmp_path.glob("*.jsonl")))
    poll_until(lambda: sum(b'"kind":"span"' in line for line in whole_lines(path)) == 1_000)
    assert enforce_budget(tmp_path, 10) == Removed()
    process.communicate("\n", timeout=60)
    assert enforce_budget(tmp_path, 10).spans == 1_000


def test_the_closed_segments_of_a_living_process_are(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path, max_bytes=1)
    attempt = tracer.attempt("uid", "group", 0)
    while len(list(tmp_path.iterdir())) < 3:
        for _ in range(100):
            attempt.add("engine", attempt.begun, 5)
        tracer.flush()
    removed = enforce_budget(tmp_path, 1)
    first, second, last = sorted(tmp_path.iterdir())
    assert removed.spans > 0
    assert kinds_of(first) == kinds_of(second) == ["dropped", "head"]
    assert kinds_of(last) == ["head", "span"]
    tracer.close()


def test_broken_lines_stay_where_they_are(tmp_path: Path) -> None:
    path = make_segment(tmp_path, 1)
    with path.open("ab") as file:
        file.write(b'{"kind":"span"}garbage\n\xff\xfe broken\n')
    enforce_budget(tmp_path, 0)
    assert path.read_bytes().endswith(b"\xff\xfe broken\n")


def test_on_a_full_disk_everything_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource
    import signal

    path = make_segment(tmp_path, 1, num_rollouts=200)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            enforce_budget(tmp_path, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
