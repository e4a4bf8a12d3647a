"""Writes spans on tracks as events of the trace-event format, one per line. The file is valid once it is closed.

The file is an array. Viewers also open it before its end is written, while a run continues.

On each track spans nest, as every trace viewer requires. A span is placed on the track of the span around it if it
lies within. Overlapping spans, such as tools that run at once, get separate tracks. Clocks of two processes may differ
slightly, so a span that sticks out by that much is cut.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, BinaryIO, Self

import msgspec

from forebay.telemetry.tracing.records import Open, RolloutSummary, Span, TurnSummary

SKEW_NS = 1_000_000
"""The largest difference between the clocks of two processes."""


_OF_SUMMARY = ("uid", "instance", "epoch", "slot", "attempt", "step", "ending", "outcome", "reward", "reward_cpu_s")
_OF_TURN = ("engine", "prompt", "cached", "sampled", "finish_reason", "has_tools", "tools", "versions")


@dataclass(slots=True)
class TrackSpan:
    """A span to be drawn."""

    name: str
    begin: int
    end: int
    id: str
    up: str = ""
    is_open: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Span | Open, end: int) -> Self:
        """A span of a record. An open record ends at ``end``, the end of the log."""
        is_open = isinstance(record, Open)
        about = {**record.at} | ({} if record.turn is None else {"turn": record.turn})
        last = max(end, record.t) if isinstance(record, Open) else record.t + record.d
        name = f"turn {record.turn}" if record.name == "turn" else record.name
        return cls(name, record.t, last, record.id, record.up, is_open, about)

    @classmethod
    def of_summary(cls, summary: RolloutSummary) -> Self:
        """The span of an attempt."""
        about: dict[str, Any] = {name: getattr(summary, name) for name in (*_OF_SUMMARY, *_OF_TURN[:4])}
        about |= {f"{phase}_s": ns / 1e9 for phase, ns in summary.phases.items()}
        known = {name: value for name, value in about.items() if value not in ("", None)}
        name = f"slot {summary.slot}" + (f", attempt {summary.attempt}" if summary.attempt else "")
        return cls(name, summary.t, summary.t + summary.d, summary.id, about=known)

    @classmethod
    def of_turn(cls, turn: TurnSummary, number: int, up: str) -> Self:
        """A turn whose spans were not kept."""
        about = {name: value for name in _OF_TURN if (value := getattr(turn, name)) not in ("", None, [])}
        about |= {f"{phase}_s": ns / 1e9 for phase, ns in turn.phases.items()}
        return cls(f"turn {number}", turn.t, turn.t + turn.d, f"{up}/{number}", up, about=about)


Edge = tuple[bool, TrackSpan]
"""True for the span's begin, False for its end."""


def tracks(spans: Iterable[TrackSpan], root: TrackSpan) -> Iterator[list[Edge]]:
    """The edges of each track in chronological order, starting with the track of ``root``."""
    by_id = {each.id: each for each in spans} | {root.id: root}
    above = {each.id: _above(each, by_id) for each in by_id.values()}
    del by_id[root.id]
    for each in sorted(by_id.values(), key=lambda span: len(above[span.id])):
        _fit(each, by_id.get(each.up, root))
    lanes = [_Lane(root)]
    for each in sorted(by_id.values(), key=lambda span: (span.begin, -span.end, len(above[span.id]))):
        lane = next((lane for lane in lanes if lane.takes(each, above[each.id])), None)
        if lane is None:
            lane = _Lane()
            lanes.append(lane)
        lane.add(each)
    for lane in lanes:
        yield lane.finish()


def _above(span: TrackSpan, by_id: dict[str, TrackSpan]) -> set[str]:
    """The ids of the spans around it."""
    found: set[str] = set()
    up = span.up
    while up in by_id and up not in found:
        found.add(up)
        up = by_id[up].up
    return found


def _fit(span: TrackSpan, around: TrackSpan) -> None:
    if around.begin - SKEW_NS <= span.begin < around.begin:
        span.begin = min(around.begin, span.end)
    if around.end < span.end <= around.end + SKEW_NS:
        span.end = max(around.end, span.begin)


class _Lane:
    """A track being filled with spans, ordered by begin."""

    def __init__(self, root: TrackSpan | None = None) -> None:
        self._open: list[TrackSpan] = []
        self._edges: list[Edge] = []
        if root is not None:
            self.add(root)

    def takes(self, span: TrackSpan, above: set[str]) -> bool:
        """Whether ``span`` nests here: the span open at its begin is one of its ancestors, and lasts as long."""
        while self._open and self._open[-1].end <= span.begin and self._open[-1].id not in above:
            self._close()
        if not self._open:
            return True
        top = self._open[-1]
        return top.begin <= span.begin and span.end <= top.end and (top.id in above or not above)

    def add(self, span: TrackSpan) -> None:
        self._open.append(span)
        self._edges.append((True, span))

    def finish(self) -> list[Edge]:
        while self._open:
            self._close()
        return self._edges

    def _close(self) -> None:
        self._edges.append((False, self._open.pop()))


TRAINER = 1
PROCESSES = 2
_FIRST_ENGINE = 100
_FIRST_GROUP = 10_000
Arrow = tuple[str, str]
"""``flow_out`` or ``flow_in``, and the id shared by both ends."""


class TraceEvents:
    """Writes events to ``file``. A viewer shows each ``pid`` as a process with its own tracks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_first = True
        self._zero = 0
        self._pids: dict[str, dict[str, int]] = {}
        self._named: set[int] = set()

    def begin_at(self, zero: int) -> None:
        """Set the time that counts as 0: nanoseconds since the epoch exceed a viewer's numbers."""
        self._zero = zero
        begins = datetime.fromtimestamp(zero / 1e9, UTC).isoformat()
        self._write(ph="M", name="process_labels", pid=TRAINER, args={"labels": f"0 is {begins}"})

    def trainer(self) -> int:
        """The pid for the trainer's reads and weights."""
        return self._named_pid(TRAINER, "trainer")

    def processes(self) -> int:
        """The pid for records about the run's processes."""
        return self._named_pid(PROCESSES, "processes")

    def engine(self, url: str) -> int:
        """The pid for an engine's calls."""
        return self._named_pid(self._pid("engine", url, _FIRST_ENGINE), f"engine {url}")

    def group(self, group: str) -> int:
        """The pid for a group's rollouts."""
        return self._named_pid(self._pid("group", group, _FIRST_GROUP), f"group {group}")

    def nested(
        self, pid: int, category: str, spans: Iterable[TrackSpan], root: TrackSpan, arrows: dict[str, Arrow]
    ) -> None:
        """Draw ``root`` and everything in it. ``arrows`` are keyed by the span at which they begin or end."""
        for number, edges in enumerate(tracks(spans, root)):
            track = {"local": f"{root.id}.{number}"}
            for is_begin, span in edges:
                name = f"{span.name} (open)" if span.is_open else span.name
                common: dict[str, Any] = {"cat": category, "id2": track, "pid": pid, "tid": 0, "name": name}
                if not is_begin:
                    self._write(ph="e", ts=self._us(span.end), **common)
                    continue
                if arrow := arrows.get(span.id):
                    common |= {"bind_id": f"0x{arrow[1]}", arrow[0]: True}
                about = span.about | ({"open": True} if span.is_open else {})
                self._write(ph="b", ts=self._us(span.begin), **common, args=about)

    def moment(self, pid: int, name: str, at: int, **about: Any) -> None:
        """Draw an event without a duration."""
        self._write(ph="i", s="p", ts=self._us(at), pid=pid, tid=0, name=name, args=about)

    def close(self) -> None:
        """Complete the file, which stays open."""
        self._file.write(b"[]\n" if self._is_first else b"\n]\n")
        self._file.flush()

    def _pid(self, kind: str, name: str, first: int) -> int:
        known = self._pids.setdefault(kind, {})
        return known.setdefault(name, first + len(known))

    def _named_pid(self, pid: int, name: str) -> int:
        if pid not in self._named:
            self._named.add(pid)
            self._write(ph="M", name="process_name", pid=pid, args={"name": name})
            self._write(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
        return pid

    def _us(self, ns: int) -> float:
        return (ns - self._zero) / 1e3

    def _write(self, **event: Any) -> None:
        self._file.write(b"[\n" if self._is_first else b",\n")
        self._is_first = False
        self._file.write(msgspec.json.encode(event))
