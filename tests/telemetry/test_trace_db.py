"""Traces are read back: whole, broken, growing, gone."""

from pathlib import Path

import msgspec
import pytest

from forebay.core.errors import ForebayError
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.read_trace import OnBadLine, find_trace, trace_files
from forebay.telemetry.tracing.records import (
    VERSION,
    Head,
    LoopStall,
    Open,
    Record,
    RolloutSummary,
    Span,
    TurnSummary,
    Weights,
)

HEAD = Head(version=VERSION, run_id="run-1", process="run", start=1, pid=7, wall_ns=10**18, mono_ns=5)
SPAN = Span(name="tool", t=10**18, d=5, id="00000000000000aa", uid="u")
PAUSE = Weights(t=10**18, what="paused")


class Bad(list[tuple[str, int, str]]):
    """What was left out."""

    def __call__(self, file: str, line: int, what: str) -> None:
        self.append((file, line, what))


def write(path: Path, *records: Record | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, bytes) else msgspec.json.encode(record) + b"\n" for record in records]
    with path.open("ab") as file:
        file.write(b"".join(lines))
    return path


def numbers(folder: Path, bad: OnBadLine) -> list[int]:
    """The lines of all records but heads, in the order of time."""
    db = TraceDB.read(folder, on_bad_line=bad)
    return [line.number for line in db.of_run()]


def test_every_record_comes_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "run-1-7.0.jsonl", HEAD, SPAN, PAUSE)
    bad = Bad()
    db = TraceDB.read(tmp_path, on_bad_line=bad)
    [line] = db.of_run()
    assert (line.writer.file, line.writer.head, line.number, line.record) == (str(path), HEAD, 3, PAUSE)
    [[attempt]] = db.rollouts([group.name for group in db.groups()])
    assert [span for _, span in attempt.spans] == [SPAN]
    assert bad == []


def test_records_of_a_group_are_found_under_its_name_or_that_of_its_rollout(tmp_path: Path) -> None:
    summary = RolloutSummary(t=10**18, d=9, id="a", uid="thing-7", group="g", instance="i")
    nameless = [msgspec.structs.replace(SPAN, uid=uid, id=uid) for uid in ("thing-7", "run-1-h-2", "alone")]
    named = msgspec.structs.replace(SPAN, uid="run-1-h-1", group="h", id="b")
    write(tmp_path / "run-1-7.0.jsonl", HEAD, *nameless, summary, named)
    db = TraceDB.read(tmp_path, on_bad_line=Bad())
    found = {group.name: {attempts[0].uid for attempts in db.rollouts([group.name])} for group in db.groups()}
    assert found == {"g": {"thing-7"}, "h": {"run-1-h-1", "run-1-h-2"}, "alone": {"alone"}}


def test_clocks_that_cannot_be_are_refused(tmp_path: Path) -> None:
    later = msgspec.structs.replace(HEAD, wall_ns=1 << 70, boot="b")
    write(tmp_path / "run-1-7.0.jsonl", msgspec.structs.replace(HEAD, boot="b"), later, SPAN)
    with pytest.raises(ForebayError, match="too large"):
        TraceDB.read(tmp_path, on_bad_line=Bad())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{\n", "not a record"),
        (b"\xff\xfe\n", "not a record"),
        (b'{"kind":"span","name":"tool","t":NaN,"d":1,"id":"a"}\n', "not a record"),
        (b'{"kind":"span","name":"tool","t":1.5,"d":1,"id":"a"}\n', "not a record"),
        (b'{"kind":"dance","t":1}\n', "not a record"),
        (b"[]\n", "not a record"),
        (msgspec.json.encode(Span(name="tool", t=-1, d=1, id="a")) + b"\n", ">= 0"),
        (msgspec.json.encode(Span(name="tool", t=1, d=-1, id="a")) + b"\n", ">= 0"),
        (msgspec.json.encode(Open(name="tool", t=-1, id="a")) + b"\n", ">= 0"),
        (msgspec.json.encode(Weights(t=-1, what="paused")) + b"\n", ">= 0"),
        (msgspec.json.encode(LoopStall(t=1, d=-1)) + b"\n", ">= 0"),
        (msgspec.json.encode(Span(name="tool", t=1, d=1, turn=-1, id="a")) + b"\n", ">= 0"),
        (msgspec.json.encode(Span(name="tool", t=(1 << 63) - 1, d=1, id="a")) + b"\n", "<= 4611686018427387904"),
    ],
)
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: bytes, what: str) -> None:
    path = write(tmp_path / "run-1-7.0.jsonl", HEAD, line, PAUSE)
    bad = Bad()
    assert numbers(tmp_path, bad) == [3]
    assert [(file, number) for file, number, _ in bad] == [(str(path), 2)]
    assert what in bad[0][2]


def test_a_summary_with_negative_parts_is_left_out(tmp_path: Path) -> None:
    summary = RolloutSummary(t=1, d=1, id="a", uid="u", group="g", instance="i")
    phases = msgspec.structs.replace(summary, phases={"tool": -1})
    turns = msgspec.structs.replace(summary, turns=[TurnSummary(t=1, d=-1)])
    write(tmp_path / "run-1-7.0.jsonl", HEAD, phases, turns, summary)
    bad = Bad()
    assert [line.number for line in TraceDB.read(tmp_path, on_bad_line=bad).summaries()] == [4]
    assert [">= 0" in what for _, _, what in bad] == [True, True]


def test_files_come_in_the_order_in_which_each_process_wrote_them(tmp_path: Path) -> None:
    names = ["gateway-1-9.0.jsonl", "run-1-7.2.jsonl", "run-1-7.10.jsonl", "run-2-6.0.jsonl"]
    for name in reversed(names):
        write(tmp_path / name, HEAD)
    write(tmp_path / "notes.jsonl", b'{"kind":"other"}\n')
    assert [path.name for path in trace_files(tmp_path)] == names


def test_a_saved_stream_is_known_by_its_head(tmp_path: Path) -> None:
    write(tmp_path / "saved.jsonl", HEAD, SPAN)
    assert [path.name for path in trace_files(tmp_path)] == ["saved.jsonl"]


def test_a_run_folder_leads_to_its_trace(tmp_path: Path) -> None:
    assert find_trace(tmp_path) is None
    write(tmp_path / "run-x" / "trace" / "run-1-7.0.jsonl", HEAD)
    assert find_trace(tmp_path / "run-x") == tmp_path / "run-x" / "trace"
    assert find_trace(tmp_path / "run-x" / "trace") == tmp_path / "run-x" / "trace"


def test_a_file_that_the_budget_took_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "run-1-7.0.jsonl", HEAD, PAUSE, b"{\n")
    gone = write(tmp_path / "run-1-7.1.jsonl", HEAD, PAUSE)
    assert numbers(tmp_path, lambda *_: gone.unlink()) == [2]


def test_a_file_of_a_later_version_is_named_and_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "run-1-7.0.jsonl", msgspec.structs.replace(HEAD, version=VERSION + 1), PAUSE)
    bad = Bad()
    assert numbers(tmp_path, bad) == []
    assert [(number, f"version {VERSION + 1}" in what) for _, number, what in bad] == [(1, True)]
