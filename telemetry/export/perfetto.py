"""Writes a trace in the trace-event format, for ui.perfetto.dev and chrome://tracing, while reading it.

Tracks: the trainer (its reads, its weights, pauses of engines), the processes (blocked event loops), each engine (its
calls), each group (its states, and a track for each attempt of its rollouts). Everything with a duration is a pair of
nestable async events: a ``b`` and an ``e`` with the same name, category and id. Arrows lead from a call in its rollout
to the call on its engine, and from a read to the groups it delivered. Times are microseconds since the first head.
"""

from hashlib import blake2b
from typing import BinaryIO

from forebay.telemetry.attempts import Attempt, Writer
from forebay.telemetry.export.server_intervals import ServerInterval, ServerIntervals, parts_of_read
from forebay.telemetry.export.trace_events import Arrow, TraceEvents, TrackSpan
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.records import (
    Dropped,
    GroupChange,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    Record,
    Span,
    Weights,
)


class PerfettoExport:
    """Draws a trace into ``file``."""

    def __init__(self, file: BinaryIO) -> None:
        self._events = TraceEvents(file)
        self._intervals = ServerIntervals()
        self._states: dict[str, list[ServerInterval]] = {}
        self._of_run: dict[str, Open] = {}
        self._stalls: dict[str, LoopStall] = {}
        self.num_attempts = 0

    def draw(self, db: TraceDB) -> None:
        """Draw all of ``db``, mark what had not ended as open, and complete the file."""
        if db.begin_ns:
            self._events.begin_at(db.begin_ns)
        for group in db.groups():
            for attempts in db.rollouts([group.name]):
                for attempt in attempts:
                    self._draw_attempt(attempt)
        for line in db.of_run():
            self._add_of_run(line.writer, line.record)
        self._draw_rest(db.last_ns)
        self._events.close()

    def _draw_rest(self, last_ns: int) -> None:
        for interval in self._intervals.rest(last_ns):
            self._add_interval(interval)
        for group in list(self._states):
            self._draw_states(group)
        for opened in self._of_run.values():
            pid = self._events.trainer() if opened.name == "read" else self._events.processes()
            self._draw(pid, opened.name, TrackSpan.of(opened, last_ns))
        for stall in self._stalls.values():
            self._draw_stall(stall)

    def _add_of_run(self, writer: Writer, record: Record) -> None:
        match record:
            case Read():
                self._of_run.pop(record.id, None)
                self._draw_read(record)
            case Open():
                self._of_run[record.id] = record
            case Span():
                self._of_run.pop(record.id, None)
                if record.name != "read" or writer.process != "server":  # those have a separate record
                    self._draw(self._events.processes(), "run", TrackSpan.of(record, 0))
            case LoopStall():
                if record.has_ended:
                    self._stalls.pop(writer.file, None)
                    self._draw_stall(record)
                else:
                    self._stalls[writer.file] = record
            case Weights(what="announced"):
                self._events.moment(self._events.trainer(), f"weights {record.version}", record.t)
            case GroupChange() | Weights():
                if interval := self._intervals.of(record):
                    self._add_interval(interval)
                if isinstance(record, GroupChange) and record.state in ("acked", "discarded"):
                    self._draw_states(record.group, record.state, record.reason)
            case ProcessChange():
                process = record.process or writer.process
                self._events.moment(self._events.processes(), f"{process} {record.what}", record.t)
            case Dropped():
                about = {"spans": record.spans, "summaries": record.summaries, "why": record.why}
                self._events.moment(self._events.processes(), "records dropped", record.t, **about)

    def _draw_attempt(self, attempt: Attempt) -> None:
        self.num_attempts += 1
        spans = [TrackSpan.of(each, attempt.end) for _, each in attempt.spans]
        if attempt.summary is not None:
            root = TrackSpan.of_summary(attempt.summary)
        else:
            id_ = attempt.id or _arrow_id(f"{attempt.uid} {attempt.number}")
            root = TrackSpan(f"rollout {attempt.uid}", attempt.begin, attempt.end, id_, is_open=attempt.is_open)
        if not spans and attempt.summary is not None:
            spans = [TrackSpan.of_turn(turn, number, root.id) for number, turn in enumerate(attempt.summary.turns)]
        calls = {each.id: each for each in spans if each.name == "engine"}
        out: dict[str, Arrow] = {each: ("flow_out", _arrow_id(each)) for each in calls}
        self._events.nested(self._events.group(attempt.group), "rollout", spans, root, out)
        for call in calls.values():
            within = [each for each in spans if each.up == call.id]
            self._draw_call(attempt, call, within)

    def _draw_call(self, attempt: Attempt, call: TrackSpan, within: list[TrackSpan]) -> None:
        engine = self._events.engine(str(call.about.get("engine") or "unknown"))
        about = {"uid": attempt.uid, "attempt": attempt.number, **call.about}
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
        """Draw one life of a group, from its opening to ``last``."""
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
    """A hexadecimal id, as the format requires."""
    return blake2b(text.encode(), digest_size=8).hexdigest()
