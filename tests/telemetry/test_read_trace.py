"""Traces are read back line by line: whole, broken, growing, gone."""

from pathlib import Path

import msgspec
import pytest

from forebay.telemetry.tracing.read_trace import TraceFolder, TraceLine, find_trace, trace_files
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


def test_every_line_comes_with_its_place(tmp_path: Path) -> None:
    write(tmp_path / "run-1-7.0.jsonl", HEAD, SPAN)
    bad = Bad()
    assert list(TraceFolder(tmp_path, bad).read()) == [
        TraceLine("run-1-7.0.jsonl", 1, HEAD),
        TraceLine("run-1-7.0.jsonl", 2, SPAN),
    ]
    assert bad == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{\n", "no record"),
        (b"\xff\xfe\n", "no record"),
        (b'{"kind":"span","name":"tool","t":NaN,"d":1,"id":"a"}\n', "no record"),
        (b'{"kind":"span","name":"tool","t":1.5,"d":1,"id":"a"}\n', "no record"),
        (b'{"kind":"dance","t":1}\n', "no record"),
        (b"[]\n", "no record"),
        (msgspec.json.encode(Span(name="tool", t=-1, d=1, id="a")) + b"\n", "a negative time"),
        (msgspec.json.encode(Span(name="tool", t=1, d=-1, id="a")) + b"\n", "a negative time"),
        (msgspec.json.encode(Open(name="tool", t=-1, id="a")) + b"\n", "a negative time"),
        (msgspec.json.encode(Weights(t=-1, what="paused")) + b"\n", "a negative time"),
        (msgspec.json.encode(LoopStall(t=1, d=-1)) + b"\n", "a negative time"),
        (msgspec.json.encode(Span(name="tool", t=1, d=1, turn=-1, id="a")) + b"\n", "a negative turn"),
        (msgspec.json.encode(Span(name="tool", t=(1 << 63) - 1, d=1, id="a")) + b"\n", "beyond"),
    ],
)
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: bytes, what: str) -> None:
    write(tmp_path / "run-1-7.0.jsonl", HEAD, line, SPAN)
    bad = Bad()
    read = list(TraceFolder(tmp_path, bad).read())
    assert [each.number for each in read] == [1, 3]
    assert [(file, number) for file, number, _ in bad] == [("run-1-7.0.jsonl", 2)]
    assert what in bad[0][2]


def test_a_summary_with_negative_parts_is_left_out(tmp_path: Path) -> None:
    summary = RolloutSummary(t=1, d=1, id="a", uid="u", group="g", instance="i")
    phases = msgspec.structs.replace(summary, phases={"tool": -1})
    turns = msgspec.structs.replace(summary, turns=[TurnSummary(t=1, d=-1)])
    write(tmp_path / "run-1-7.0.jsonl", HEAD, phases, turns, summary)
    bad = Bad()
    assert [line.number for line in TraceFolder(tmp_path, bad).read()] == [1, 4]
    assert [what for _, _, what in bad] == ["a negative time"] * 2


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
    path = write(tmp_path / "run-1-7.0.jsonl", HEAD, SPAN)
    write(tmp_path / "run-1-7.1.jsonl", HEAD)
    folder = TraceFolder(tmp_path, Bad())
    lines = folder.read()
    assert next(lines).file == path.name
    path.with_name("run-1-7.1.jsonl").unlink()
    assert [line.number for line in lines] == [2]


def test_a_file_of_a_later_version_is_named_and_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "run-1-7.0.jsonl", msgspec.structs.replace(HEAD, version=VERSION + 1), SPAN)
    bad = Bad()
    assert list(TraceFolder(tmp_path, bad).read()) == []
    assert [(number, f"version {VERSION + 1}" in what) for _, number, what in bad] == [(1, True)]
