"""Traces in the trace-event format: every ``b`` has its ``e``, and what is drawn where."""

import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.telemetry.attempts import Writer
from forebay.telemetry.export.perfetto import PerfettoExport, tracks
from forebay.telemetry.export.span_trees import ExportSpan
from forebay.telemetry.tracing.records import LoopStall, Record, TurnSummary, Weights
from tests.telemetry.log_kit import (
    ENGINE,
    ZERO,
    S,
    delivery,
    make_log,
    rollout,
    span,
    span_id,
    still_open,
    summary,
    write_log,
)
from tests.telemetry.trace_kit import read_whole

Json = dict[str, Any]


def drawn(folder: Path) -> list[Json]:
    """The events of a log, checked."""
    file = io.BytesIO()
    PerfettoExport(file).draw(read_whole(folder))
    events: list[Json] = json.loads(file.getvalue())
    check_pairs(events)
    return events


def check_pairs(events: list[Json]) -> None:
    """Each ``b`` has its ``e``: of the same name, and innermost first; the times of a track never go back."""
    stacks: defaultdict[tuple[int, str, str], list[str]] = defaultdict(list)
    last: dict[tuple[int, str, str], float] = {}
    closed: set[tuple[int, str, str]] = set()
    current = None
    for event in events:
        assert event["ph"] in "beiM", event
        if event["ph"] not in "be":
            continue
        track = (event["pid"], event["cat"], event["id2"]["local"])
        if track != current and current is not None:
            assert not stacks[current], "a track is written in one piece"
            closed.add(current)
        assert track not in closed, "no track has the id of another"
        current = track
        assert event["ts"] >= last.get(track, event["ts"])
        last[track] = event["ts"]
        if event["ph"] == "b":
            stacks[track].append(event["name"])
        else:
            assert stacks[track].pop() == event["name"]
    assert [stack for stack in stacks.values() if stack] == []


def processes(events: list[Json]) -> dict[str, int]:
    return {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}


def begun(events: list[Json], process: str) -> dict[str, Json]:
    pid = processes(events)[process]
    return {event["name"]: event for event in events if event["pid"] == pid and event["ph"] == "b"}


def test_a_trace_is_drawn_by_trainer_engine_and_group(tmp_path: Path) -> None:
    events = drawn(make_log(tmp_path))
    assert set(processes(events)) == {"trainer", "processes", f"engine {ENGINE}", "group g"}
    group = begun(events, "group g")
    assert {"slot 3", "queue", "turn 0", "turn 1", "engine", "decode", "tool", "parse", "reward"} <= set(group)
    assert {"group", "open", "ready", "leased"} <= set(group)
    assert group["slot 3"]["args"]["reward"] == 0.5
    assert group["slot 3"]["args"]["uid"] == "u-0"
    assert group["reward"]["args"]["cpu_s"] == 0.9
    assert {"call", "decode", "engine_queue"} == set(begun(events, f"engine {ENGINE}"))
    trainer = begun(events, "trainer")
    assert {"read", "wait for group g", "hooks", "delivery", "engines paused"} == set(trainer)
    assert trainer["read"]["args"]["trainer_step"] == 67
    assert begun(events, "processes")["event loop stood still"]["args"]["stack"] == ["file.py:1 sleep"]
    moments = {event["name"]: event["ts"] for event in events if event["ph"] == "i"}
    assert moments == {"weights 5": 1e6, "server started": 0, "server ended": 1e7}


def test_times_are_microseconds_since_the_first_head(tmp_path: Path) -> None:
    events = drawn(make_log(tmp_path))
    turn = [event["ts"] for event in events if event["name"] == "turn 1"]
    assert turn == [6e6, 8e6]
    labels = next(event for event in events if event["name"] == "process_labels")
    assert "2023-11-14T22:13:20" in labels["args"]["labels"]


def test_what_overlaps_has_a_track_of_its_own(tmp_path: Path) -> None:
    """Tools that run at once are no children of each other."""
    events = drawn(make_log(tmp_path))
    tools = [event for event in events if event["name"] == "tool" and event["ph"] == "b"]
    assert len({event["id2"]["local"] for event in tools}) == 2


def test_arrows_have_both_ends(tmp_path: Path) -> None:
    events = drawn(make_log(tmp_path))
    ends: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for event in events:
        if "bind_id" in event:
            ends[event["bind_id"]].append((event["name"], "out" if event.get("flow_out") else "in"))
    assert sorted(sorted(each) for each in ends.values()) == [
        [("call", "in"), ("engine", "out")],
        [("call", "in"), ("engine", "out")],
        [("leased", "in"), ("read", "out")],
    ]


def test_what_is_open_is_closed_at_the_end_of_the_log_and_marked(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        "run",
        still_open(0, 1, "attempt", up=0),
        still_open(1, 2, at={"engine": ENGINE, "load": {"queue": 9}}),
    )
    records: list[Record] = [*delivery()[:4], LoopStall(t=ZERO + 3 * S, d=S, has_ended=False)]
    write_log(tmp_path, "server", *records, still_open(0, 90, "read", up=0, uid="", group=""))
    write_log(tmp_path, "gateway", Weights(t=ZERO + 20 * S, what="announced", version=1))
    events = drawn(tmp_path)
    opened = {event["name"]: event for event in events if event["ph"] == "b"}
    assert set(opened) == {
        "rollout u-0 (open)",
        "engine (open)",
        "call (open)",
        "group (open)",
        "open (open)",
        "engines paused (open)",
        "read (open)",
        "event loop stood still (open)",
    }
    assert all(event["args"]["open"] for event in opened.values())
    assert opened["engine (open)"]["args"]["load"] == {"queue": 9}
    ends = {event["name"]: event["ts"] for event in events if event["ph"] == "e"}
    assert ends["engine (open)"] == ends["rollout u-0 (open)"] == ends["read (open)"] == 20e6


def test_a_rollout_without_spans_is_drawn_from_its_summary(tmp_path: Path) -> None:
    turns = [TurnSummary(t=ZERO, d=S, engine=ENGINE, sampled=3), TurnSummary(t=ZERO + S, d=S)]
    write_log(tmp_path, "run", summary(0, 2, turns=turns, attempt=1))
    group = begun(drawn(tmp_path), "group g")
    assert list(group) == ["slot 0, attempt 1", "turn 0", "turn 1"]
    assert group["turn 0"]["args"]["sampled"] == 3


def test_spans_of_other_processes_join_their_attempt_however_late_they_are(tmp_path: Path) -> None:
    write_log(tmp_path, "run", summary(0, 2), summary(50, 1, 40, uid="u-1"))
    write_log(tmp_path, "gateway", span("engine", 0.5, 1, 4), span("engine", 60, 1, 5, uid="u-0"))
    events = drawn(tmp_path)
    drawn_at: defaultdict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b" and event["cat"] == "rollout":
            drawn_at[event["id2"]["local"]].append(event["name"])
    first, second = span_id(1), span_id(40)
    assert drawn_at == {f"{first}.0": ["slot 0", "engine"], f"{first}.1": ["engine"], f"{second}.0": ["slot 0"]}


@pytest.mark.parametrize("lines", [(), (b"{broken\n",), (b'{"kind":"span","t":-1}\n', b"\xff\n")], ids=str)
def test_a_log_without_spans_is_a_valid_empty_file(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    write_log(tmp_path, "run", *lines)
    assert [event["ph"] for event in drawn(tmp_path) if event["ph"] != "M"] == []


def test_a_file_without_a_head_is_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "run-1-7.0.jsonl").write_bytes(b"")
    assert drawn(tmp_path) == []


def test_broken_lines_between_cost_nothing_else(tmp_path: Path) -> None:
    write_log(tmp_path, "run", b"{broken\n", *rollout(), b"half a li")
    assert "slot 3" in begun(drawn(tmp_path), "group g")


def a_track_span(name: str, begin: int, end: int, own_id: str, up: str = "") -> ExportSpan:
    return ExportSpan(name, begin, end, own_id, Writer("run.jsonl"), up)


times = st.integers(0, 20)
a_span = st.tuples(times, times, st.integers(1, 12), st.integers(0, 12))


@given(st.lists(a_span, max_size=12, unique_by=lambda each: each[2]), st.integers(0, 20))
def test_whatever_overlaps_each_track_nests(given_spans: list[tuple[int, int, int, int]], end: int) -> None:
    spans = [a_track_span(f"s{n}", begin, begin + d, span_id(n), span_id(up)) for begin, d, n, up in given_spans]
    root = a_track_span("root", 0, end, span_id(0))
    seen: list[str] = []
    for edges in tracks([root, *spans]):
        stack: list[ExportSpan] = []
        last = 0
        for is_begin, each in edges:
            now = each.begin if is_begin else each.end
            assert now >= last
            last = now
            if is_begin:
                stack.append(each)
                seen.append(each.id)
            else:
                assert stack.pop() is each
        assert stack == []
    assert sorted(seen) == sorted([root.id, *(each.id for each in spans)])


def test_a_parent_that_begins_a_little_late_still_holds_its_child() -> None:
    """The clocks of two processes differ."""
    root = a_track_span("root", 0, 100_000_000, "r")
    turn = a_track_span("turn", 50_000_000, 80_000_000, "t", "r")
    call = a_track_span("engine", 49_900_000, 80_100_000, "c", "t")
    assert [each.name for (_, each) in next(iter(tracks([root, call, turn])))] == [
        "root",
        "turn",
        "engine",
        "engine",
        "turn",
        "root",
    ]
