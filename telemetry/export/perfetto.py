"""A trace in the trace-event format, for ui.perfetto.dev and chrome://tracing, written as the log is read.

Tracks: the trainer (its reads, its weights, pauses of engines), the processes (loops that stood still), each engine
(its calls), each group (its states, and a track for each attempt of its rollouts). All that lasts are nestable async
events: a ``b`` and an ``e`` of one name, category and id. Arrows lead from a call in its rollout to the same on its
engine, and from a read to the groups that went out with it. Times are in microseconds since the log's first head.
"""

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import BinaryIO

from forebay.telemetry.export.attempt_tracks import TrackSpan
from forebay.telemetry.export.server_intervals import ServerInterval, ServerIntervals, parts_of_read
from forebay.telemetry.export.trace_events import Arrow, TraceEvents
from forebay.telemetry.tracing.read_trace import TraceLine
from forebay.telemetry.tracing.records import (
    Dropped,
    GroupChange,
    Head,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    Record,
    RolloutSummary,
    Span,
    Weights,
)

LATE_NS = 2_000_000_000
"""So long after the end of an attempt the spans that other processes have of it are waited for."""

_Key = tuple[str, int]


@dataclass(slots=True)
class _Attempt:
    """What is known of an attempt that is not drawn yet."""

    group: str = ""
    spans: list[Span] = field(default_factory=list)
    open: dict[str, Open] = field(default_factory=dict)
    summary: RolloutSummary | None = None


class PerfettoExport:
    """Draws the lines that it is given into ``file``; best in the order of time, as ``TraceFolder.merged`` has them."""

    def __init__(self, file: BinaryIO) -> None:
        self._events = TraceEvents(file)
        self._attempts: dict[_Key, _Attempt] = {}
        self._ended: deque[tuple[int, _Key]] = deque()
        self._drawn: set[_Key] = set()
        self._intervals = ServerIntervals()
        self._states: dict[str, list[ServerInterval]] = {}
        self._of_run: dict[str, Open] = {}
        self._stalls: dict[str, LoopStall] = {}
        self._last_ns = 0
        self.num_attempts = 0

    def add(self, line: TraceLine) -> None:
        """Take one more line."""
        record = line.record
        if isinstance(record, Head):
            self._events.begin_at(record.wall_ns)
            return
        self._last_ns = max(self._last_ns, record.t + getattr(record, "d", 0))
        if isinstance(record, Span | Open | RolloutSummary) and record.uid:
            self._add_to_attempt(record)
        else:
            self._add_of_run(line.file, record)
        while self._ended and self._ended[0][0] + LATE_NS < self._last_ns:
            self._draw_attempt(self._ended.popleft()[1])

    def finish(self) -> None:
        """The log has ended: draw the rest, what had not ended marked as open, and write the end of the file."""
        for key in list(self._attempts):
            self._draw_attempt(key)
        for interval in self._intervals.rest(self._last_ns):
            self._add_interval(interval)
        for group in list(self._states):
            self._draw_states(group)
        for opened in self._of_run.values():
            pid = self._events.trainer() if opened.name == "read" else self._events.processes()
            self._draw(pid, opened.name, TrackSpan.of(opened, self._last_ns))
        for stall in self._stalls.values():
            self._draw_stall(stall)
        self._events.close()

    def _add_to_attempt(self, record: Span | Open | RolloutSummary) -> None:
        key = record.uid, record.attempt
        if key in self._drawn:
            if isinstance(record, Span):  # later than others of its attempt: on a track of its own
                self._draw(self._events.group(record.group), "late", TrackSpan.of(record, 0))
            return
        attempt = self._attempts.setdefault(key, _Attempt())
        attempt.group = record.group or attempt.group
        match record:
            case Open():
                attempt.open[record.id] = record
            case Span():
                attempt.open.pop(record.id, None)
                attempt.spans.append(record)
            case RolloutSummary():
                attempt.summary = record
                self._ended.append((record.t + record.d, key))

    def _add_of_run(self, file: str, record: Record) -> None:
        match record:
            case Read():
                self._of_run.pop(record.id, None)
                self._draw_read(record)
            case Open():
                self._of_run[record.id] = record
            case Span():
                self._of_run.pop(record.id, None)
                if record.name != "read" or not file.startswith("server"):  # those have a record of their own
                    self._draw(self._events.processes(), "run", TrackSpan.of(record, 0))
            case LoopStall():
                if record.has_ended:
                    self._stalls.pop(file, None)
                    self._draw_stall(record)
                else:
                    self._stalls[file] = record
            case Weights(what="announced"):
                self._events.moment(self._events.trainer(), f"weights {record.version}", record.t)
            case GroupChange() | Weights():
                if interval := self._intervals.of(record):
                    self._add_interval(interval)
                if isinstance(record, GroupChange) and record.state in ("acked", "discarded"):
                    self._draw_states(record.group, record.state, record.reason)
            case ProcessChange():
                process = getattr(record, "process", "") or file.partition("-")[0]
                self._events.moment(self._events.processes(), f"{process} {record.what}", record.t)
            case Dropped():
                about = {"spans": record.spans, "summaries": record.summaries, "why": record.why}
                self._events.moment(self._events.processes(), "records dropped", record.t, **about)

    def _draw_attempt(self, key: _Key) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            return
        self._drawn.add(key)
        self.num_attempts += 1
        records: list[Span | Open] = [*attempt.spans, *attempt.open.values()]
        spans = [TrackSpan.of(each, self._last_ns) for each in records]
        root = self._root(key, attempt, spans)
        if not spans and attempt.summary is not None:
            spans = [TrackSpan.of_turn(turn, number, root.id) for number, turn in enumerate(attempt.summary.turns)]
        calls = {each.id: each for each in spans if each.name == "engine"}
        out: dict[str, Arrow] = {each: ("flow_out", _arrow_id(each)) for each in calls}
        self._events.nested(self._events.group(attempt.group), "rollout", spans, root, out)
        for call in calls.values():
            within = [each for each in spans if each.up == call.id]
            self._draw_call(key, call, within)

    def _root(self, key: _Key, attempt: _Attempt, spans: list[TrackSpan]) -> TrackSpan:
        """The attempt itself; without a summary, as far as it is known."""
        if attempt.summary is not None:
            return TrackSpan.of_summary(attempt.summary)
        for each in spans:
            if each.name == "attempt":
                each.name = f"rollout {key[0]}"
                return each
        begin, end = min(each.begin for each in spans), max(each.end for each in spans)
        up = next((each.up for each in spans if each.up), _arrow_id(f"{key}"))
        return TrackSpan(f"rollout {key[0]}", begin, end, up, is_open=any(each.is_open for each in spans))

    def _draw_call(self, key: _Key, call: TrackSpan, within: list[TrackSpan]) -> None:
        engine = self._events.engine(str(call.about.get("engine") or "unknown"))
        about = {"uid": key[0], "attempt": key[1], **call.about}
        root = TrackSpan("call", call.begin, call.end, call.id, is_open=call.is_open, about=about)
        self._events.nested(engine, "engine", within, root, {call.id: ("flow_in", _arrow_id(call.id))})

    def _draw_read(self, read: Read) -> None:
        parts = parts_of_read(read)
        about = {
            name: value
            for name in ("step", "by", "batch", "weights", "num_polls", "num_rows", "num_bytes", "worst")
            if (value := getattr(read, name)) not in ("", None)
        }
        root = TrackSpan("read", read.t, parts[-1].end if parts else read.t, read.id, about=about)
        spans = [
            TrackSpan(each.name, each.begin, each.end, f"{read.id}/{each.name}", up=read.id, about=about)
            for each in parts
        ]
        if spans and read.by:
            spans[0].name = f"wait for group {read.by}"
        arrows: dict[str, Arrow] = {read.id: ("flow_out", _arrow_id(read.batch))} if read.batch else {}
        self._events.nested(self._events.trainer(), "read", spans, root, arrows)

    def _add_interval(self, interval: ServerInterval) -> None:
        if interval.group:
            self._states.setdefault(interval.group, []).append(interval)
        else:
            span = TrackSpan(interval.name, interval.begin, interval.end, f"pause-{interval.begin}")
            span.is_open = interval.is_open
            self._draw(self._events.trainer(), "pause", span)

    def _draw_states(self, group: str, last: str = "", reason: str = "") -> None:
        """One life of a group, from its opening to ``last``."""
        states = self._states.pop(group, [])
        if not states:
            return
        root_id = f"{_arrow_id(group)}-{states[0].begin}"
        about = {name: value for name, value in {"ended": last, "reason": reason}.items() if value}
        root = TrackSpan("group", states[0].begin, states[-1].end, root_id, is_open=not last, about=about)
        spans, arrows = [], dict[str, Arrow]()
        for number, state in enumerate(states):
            span_id = f"{root_id}/{number}"
            about = {"batch": state.batch} if state.batch else {}
            spans.append(
                TrackSpan(state.name, state.begin, state.end, span_id, root_id, is_open=state.is_open, about=about)
            )
            if state.batch:
                arrows[span_id] = "flow_in", _arrow_id(state.batch)
        self._events.nested(self._events.group(group), "group", spans, root, arrows)

    def _draw_stall(self, stall: LoopStall) -> None:
        about = {"stack": stall.stack}
        span = TrackSpan("event loop stood still", stall.t, stall.t + stall.d, f"loop-{stall.t}", about=about)
        span.is_open = not stall.has_ended
        self._draw(self._events.processes(), "loop", span)

    def _draw(self, pid: int, category: str, span: TrackSpan) -> None:
        self._events.nested(pid, category, (), span, {})


def _arrow_id(text: str) -> str:
    """Hexadecimal, as the format wants it."""
    return blake2b(text.encode(), digest_size=8).hexdigest()
