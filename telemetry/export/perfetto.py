"""Writes a trace in the trace-event format, for ui.perfetto.dev and chrome://tracing, while reading it.

Tracks: the trainer (its reads, its weights, pauses of engines), the processes (blocked event loops), each engine (its
calls), each group (its states, and a track for each attempt of its rollouts). Everything with a duration is a pair of
nestable async events: a ``b`` and an ``e`` with the same name, category and id. Arrows lead from a call in its rollout
to the call on its engine, and from a read to the groups it delivered. Times are microseconds since the first head.

On each track spans nest, as every trace viewer requires. A span is placed on the track of the span around it if it
lies within. Overlapping spans, such as tools that run at once, get separate tracks. Clocks of two processes may differ
slightly, so a span that sticks out by that much is cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from forebay.telemetry.export.span_trees import ExportSpan, SpanTree, derived_id, span_trees
from forebay.telemetry.trace_db import TraceDB

_SKEW_NS = 1_000_000
"""The largest difference between the clocks of two processes."""
_TRAINER, _PROCESSES, _ENGINES, _GROUPS = range(1, 5)
"""Order of the tracks."""
_OF_TRAINER = ("read", "pause", "weights")
_MOMENTS = ("weights", "process")


class PerfettoExport:
    """Draws a trace into ``file``, one event per line. The file is an array that is valid once it is complete.

    Viewers also open it before its end is written, while a run continues.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._separator = b"[\n"
        self._zero = 0
        self._pids: dict[str, int] = {}
        self.num_attempts = 0

    def draw(self, db: TraceDB) -> None:
        """Draw all of ``db``, mark what had not ended as open, and complete the file."""
        self._zero = db.begin_ns  # nanoseconds since the epoch exceed a viewer's numbers
        if self._zero:
            begins = datetime.fromtimestamp(self._zero / 1e9, UTC).isoformat()
            pid = self._pid(_TRAINER, "trainer")
            self._write(ph="M", name="process_labels", pid=pid, args={"labels": f"0 is {begins}"})
        for tree in span_trees(db):
            self._draw(tree)
        self._file.write(b"\n]\n" if self._pids else b"[]\n")

    def _draw(self, tree: SpanTree) -> None:
        root = tree.spans[0]
        if tree.kind in ("rollout", "group"):
            pid = self._pid(_GROUPS, f"group {root.group}")
        elif tree.kind in _OF_TRAINER:
            pid = self._pid(_TRAINER, "trainer")
        else:
            pid = self._pid(_PROCESSES, "processes")
        if tree.kind in _MOMENTS:
            self._write(ph="i", s="p", ts=self._us(root.begin), pid=pid, tid=0, name=_title(root), args=root.about)
            return
        self._draw_nested(pid, tree.kind, tree.spans)
        if tree.kind == "rollout":
            self.num_attempts += 1
            for call in [each for each in tree.spans if each.name == "engine"]:
                self._draw_call(root, call, [each for each in tree.spans if each.up == call.id])

    def _draw_call(self, root: ExportSpan, call: ExportSpan, within: Sequence[ExportSpan]) -> None:
        pid = self._pid(_ENGINES, f"engine {call.about.get('engine') or 'unknown'}")
        about = {"uid": root.uid, "attempt": root.attempt, **call.about}
        self._draw_nested(pid, "engine", [replace(call, name="call", about=about), *within])

    def _draw_nested(self, pid: int, category: str, spans: Sequence[ExportSpan]) -> None:
        """Draw the first span and everything in it, on as many tracks as needed."""
        for number, edges in enumerate(tracks(spans)):
            track = {"cat": category, "id2": {"local": f"{spans[0].id}.{number}"}, "pid": pid, "tid": 0}
            for is_begin, span in edges:
                name = f"{_title(span)} (open)" if span.is_open else _title(span)
                if is_begin:
                    more = {"args": _args(span), **_arrow(category, span)}
                    self._write(ph="b", ts=self._us(span.begin), name=name, **track, **more)
                else:
                    self._write(ph="e", ts=self._us(span.end), name=name, **track)

    def _pid(self, order: int, name: str) -> int:
        """A viewer shows each ``pid`` as a process with its own tracks."""
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = order * 1_000_000 + len(self._pids)
            self._write(ph="M", name="process_name", pid=pid, args={"name": name})
            self._write(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
        return pid

    def _us(self, ns: int) -> float:
        return (ns - self._zero) / 1e3

    def _write(self, **event: Any) -> None:
        self._file.write(self._separator + msgspec.json.encode(event))
        self._separator = b",\n"


def _title(span: ExportSpan) -> str:
    about = span.about
    if span.name == "attempt" and not span.up:
        number = f", attempt {span.attempt}" if span.attempt else ""
        return f"slot {about['slot']}{number}" if "slot" in about else f"rollout {span.uid}"
    if span.name == "turn" and span.turn is not None:
        return f"turn {span.turn}"
    if span.name == "wait" and "released_by" in about:
        return f"wait for group {about['released_by']}"
    if span.name == "weights announced":
        return f"weights {about.get('weight_version')}"
    return span.name


def _args(span: ExportSpan) -> dict[str, Any]:
    turn = {} if span.turn is None else {"turn": span.turn}
    return {**span.about, **turn, **({"open": True} if span.is_open else {})}


def _arrow(category: str, span: ExportSpan) -> dict[str, Any]:
    """The end of an arrow at ``span``, whose other end has the same id."""
    is_call = category in ("rollout", "engine") and span.name in ("engine", "call")
    text = span.id if is_call else span.about.get("batch_id") if category in ("read", "group") else None
    if not text:
        return {}
    return {"bind_id": f"0x{derived_id(text)}", "flow_out" if category in ("rollout", "read") else "flow_in": True}


Edge = tuple[bool, ExportSpan]
"""True for the span's begin, False for its end."""


def tracks(spans: Sequence[ExportSpan]) -> Iterator[list[Edge]]:
    """The edges of each track in chronological order, starting with the track of the first span, the root."""
    root = spans[0]
    by_id = {each.id: each for each in reversed(spans)}
    above = {each.id: _above(each, by_id) for each in by_id.values()}
    del by_id[root.id]
    for each in sorted(by_id.values(), key=lambda span: len(above[span.id])):
        _fit(each, by_id.get(each.up, root))
    lanes = [_Lane(root)]
    for each in sorted(by_id.values(), key=lambda span: (span.begin, -span.end, len(above[span.id]))):
        lane = next((lane for lane in lanes if lane.takes(each, above[each.id])), None)
        if lane is not None:
            lane.add(each)
        else:
            lanes.append(_Lane(each))
    return (lane.finish() for lane in lanes)


def _above(span: ExportSpan, by_id: dict[str, ExportSpan]) -> set[str]:
    """The ids of the spans around it."""
    found: set[str] = set()
    up = span.up
    while up in by_id and up not in found:
        found.add(up)
        up = by_id[up].up
    return found


def _fit(span: ExportSpan, around: ExportSpan) -> None:
    if around.begin - _SKEW_NS <= span.begin < around.begin:
        span.begin = min(around.begin, span.end)
    if around.end < span.end <= around.end + _SKEW_NS:
        span.end = max(around.end, span.begin)


class _Lane:
    """A track being filled with spans, ordered by begin."""

    def __init__(self, first: ExportSpan) -> None:
        self._open = [first]
        self._edges = [(True, first)]

    def takes(self, span: ExportSpan, above: set[str]) -> bool:
        """Whether ``span`` nests here: the span open at its begin is one of its ancestors, and lasts as long."""
        while self._open and self._open[-1].end <= span.begin and self._open[-1].id not in above:
            self._close()
        if not self._open:
            return True
        top = self._open[-1]
        return top.begin <= span.begin and span.end <= top.end and (top.id in above or not above)

    def add(self, span: ExportSpan) -> None:
        self._open.append(span)
        self._edges.append((True, span))

    def finish(self) -> list[Edge]:
        while self._open:
            self._close()
        return self._edges

    def _close(self) -> None:
        self._edges.append((False, self._open.pop()))
