"""Converts a trace to trees of spans, from which every export is made.

Ids are those under which the spans were recorded. What was recorded without an id, such as a state of a group, gets one
that is the same for every export of the trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Self

from forebay.telemetry.attempts import Attempt, TraceLine, Writer
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.records import (
    Dropped,
    GroupChange,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    RolloutSummary,
    Span,
    TurnSummary,
    Weights,
)

_LAST_STATES = ("acked", "discarded")
_OF_SUMMARY = ("uid", "engine", "epoch", "slot", "step", "ending", "outcome", "reward", "reward_cpu_s", "is_capped")
_OF_TURN = ("engine", "prompt", "cached", "sampled", "finish_reason", "has_tools", "tools", "versions")


@dataclass(slots=True)
class ExportSpan:
    """A span to be exported. Times in nanoseconds since the Unix epoch."""

    name: str
    begin: int
    end: int
    id: str
    writer: Writer
    up: str = ""
    """The enclosing span; "" for the root of a tree."""
    uid: str = ""
    """The rollout's uid; "" outside rollouts."""
    group: str = ""
    attempt: int = 0
    turn: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Attributes, as recorded."""
    is_open: bool = False
    """Whether it had not ended when its log ended."""

    @classmethod
    def of(cls, writer: Writer, record: Span | Open, end: int) -> Self:
        """A recorded span. If it never ended, it lasts until ``end``."""
        known = record.id, writer, record.up, record.uid, record.group, record.attempt, record.turn, record.at
        if isinstance(record, Span):
            return cls(record.name, record.t, record.t + record.d, *known)
        return cls(record.name, record.t, max(end, record.t), *known, is_open=True)


class SpanTree(NamedTuple):
    """A span and everything in it."""

    kind: Literal["rollout", "group", "read", "pause", "weights", "loop", "run", "process"]
    """``weights`` and ``process`` are moments: one span without a duration."""
    spans: list[ExportSpan]
    """The root first."""


def span_trees(db: TraceDB) -> Iterator[SpanTree]:
    """All of ``db``: attempts of rollouts by group, then everything else. What never ended is marked as open."""
    for group in db.groups():
        for attempts in db.rollouts([group.name]):
            yield from map(_rollout, attempts)
    yield from _TreesOfRun(db.last_ns).of(db)


def derived_id(*parts: str) -> str:
    """16 hex digits."""
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _rollout(attempt: Attempt) -> SpanTree:
    """An attempt of a rollout. If its spans were not kept, it has the turns of its summary."""
    root = ExportSpan(
        "attempt",
        attempt.begin,
        attempt.end,
        attempt.id or derived_id(attempt.uid, str(attempt.number)),
        attempt.writer,
        uid=attempt.uid,
        group=attempt.group,
        attempt=attempt.number,
        is_open=attempt.is_open,
    )
    spans = [ExportSpan.of(writer, span, attempt.end) for writer, span in attempt.spans]
    if attempt.summary is not None:
        root.about = _about_attempt(attempt.summary)
        spans = spans or [_turn(root, number, turn) for number, turn in enumerate(attempt.summary.turns)]
    return SpanTree("rollout", [root, *spans])


def _about_attempt(summary: RolloutSummary) -> dict[str, Any]:
    has_failed = summary.ending in ("failed", "retried")
    return _known(
        **{name: getattr(summary, name) for name in _OF_SUMMARY},
        instance_id=str(summary.instance),
        weight_versions=list(dict.fromkeys(each for turn in summary.turns for each in turn.versions)),
        error=(summary.outcome or "failed") if has_failed else "",
        num_turns=len(summary.turns),
        prompt_tokens=summary.prompt,
        cached_tokens=summary.cached,
        sampled_tokens=summary.sampled,
        **_seconds(summary.phases),
    )


def _turn(root: ExportSpan, number: int, turn: TurnSummary) -> ExportSpan:
    about = _known(**{name: getattr(turn, name) for name in _OF_TURN}, **_seconds(turn.phases))
    own_id = derived_id(root.id, str(number))
    known = own_id, root.writer, root.id, root.uid, root.group, root.attempt, number
    return ExportSpan("turn", turn.t, turn.t + turn.d, *known, about)


def _read(writer: Writer, read: Read) -> SpanTree:
    """A read, with those of its parts that were recorded."""
    about = _known(
        trainer_step=read.step,
        weight_version=read.weights,
        released_by=read.by,
        batch_id=read.batch,
        num_groups=len(read.groups),
        num_rows=read.num_rows,
        num_bytes=read.num_bytes,
        num_polls=read.num_polls,
        error=read.worst,
    )
    root = ExportSpan("read", read.t, read.t, read.id, writer, about=about)
    spans = [root]
    for name, end in (("wait", read.satisfied), ("hooks", read.judged), ("delivery", read.sent)):
        if end >= root.end:
            spans.append(ExportSpan(name, root.end, end, derived_id(read.id, name), writer, read.id))
            root.end = end
    if len(spans) > 1:
        spans[1].about = _known(released_by=read.by)
    return SpanTree("read", spans)


class _TreesOfRun:
    """The trees of records outside rollouts. The log ends at ``end``."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._open: dict[tuple[str, str], SpanTree] = {}
        """What has not ended, by kind and name."""

    def of(self, db: TraceDB) -> Iterator[SpanTree]:
        for line in db.of_run():
            yield from self._line(line)
        yield from self._open.values()

    def _line(self, line: TraceLine) -> Iterator[SpanTree]:
        writer, _, record = line
        match record:
            case Open():
                kind: Literal["read", "run"] = "read" if record.name == "read" else "run"
                self._open["span", record.id] = SpanTree(kind, [ExportSpan.of(writer, record, self._end)])
            case Span():
                self._open.pop(("span", record.id), None)
                if record.name != "read" or writer.process != "server":  # those have a separate record
                    yield SpanTree("run", [ExportSpan.of(writer, record, self._end)])
            case Read():
                self._open.pop(("span", record.id), None)
                yield _read(writer, record)
            case LoopStall():
                yield from self._stall(line, record)
            case GroupChange():
                yield from self._group(line, record)
            case Weights(what="announced"):
                yield SpanTree("weights", [_moment(line, "weights announced", weight_version=record.version)])
            case Weights():
                yield from self._pause(line, record)
            case ProcessChange():
                yield SpanTree("process", [_moment(line, f"{record.process or writer.process} {record.what}")])
            case Dropped():
                span = _moment(line, "records dropped")
                span.about = _known(spans=record.spans, summaries=record.summaries, why=record.why)
                yield SpanTree("process", [span])

    def _stall(self, line: TraceLine, stall: LoopStall) -> Iterator[SpanTree]:
        self._open.pop(("loop", line.writer.file), None)
        span = _moment(line, "event loop stood still", stack=stall.stack)
        span.end, span.is_open = stall.t + stall.d, not stall.has_ended
        if stall.has_ended:
            yield SpanTree("loop", [span])
        else:
            self._open["loop", line.writer.file] = SpanTree("loop", [span])

    def _pause(self, line: TraceLine, weights: Weights) -> Iterator[SpanTree]:
        if pause := self._open.pop(("pause", ""), None):
            _end(pause.spans[0], weights.t)
            yield pause
        if weights.what == "paused":
            span = self._unended(_moment(line, "engines paused", weight_version=weights.version))
            self._open["pause", ""] = SpanTree("pause", [span])

    def _group(self, line: TraceLine, change: GroupChange) -> Iterator[SpanTree]:
        """The whole life of a group: its states, from its opening to its last one."""
        key = "group", change.group
        life = self._open.get(key)
        if life is not None:
            _end(life.spans[-1], change.t)
            _end(life.spans[0], change.t)
        if change.state not in _LAST_STATES:
            root = life.spans[0] if life else self._unended(_moment(line, "group", change.group))
            root.is_open = True
            state = self._unended(_moment(line, change.state, change.group, batch_id=change.batch))
            state.up, root.end = root.id, state.end
            self._open.setdefault(key, SpanTree("group", [root])).spans.append(state)
        elif life is not None:
            life.spans[0].about = _known(ended=change.state, reason=change.reason)
            yield self._open.pop(key)

    def _unended(self, span: ExportSpan) -> ExportSpan:
        span.end, span.is_open = max(self._end, span.begin), True
        return span


def _moment(line: TraceLine, name: str, group: str = "", **about: Any) -> ExportSpan:
    """A span that begins and ends with a record that has no id."""
    writer, number, record = line
    begin: int = record.t  # type: ignore[union-attr]  # heads are no records of a run
    own_id = derived_id(writer.name, str(number), name)
    return ExportSpan(name, begin, begin, own_id, writer, group=group, about=_known(**about))


def _end(span: ExportSpan, at: int) -> None:
    span.end, span.is_open = max(at, span.begin), False


def _seconds(phases: dict[str, int]) -> dict[str, float]:
    return {f"phase.{phase}_s": ns / 1e9 for phase, ns in phases.items()}


def _known(**about: Any) -> dict[str, Any]:
    return {name: value for name, value in about.items() if value not in ("", None, [])}
