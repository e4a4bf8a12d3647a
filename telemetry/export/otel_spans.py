"""Converts records to finished OpenTelemetry spans, and keeps the ids under which they were recorded.

An agent's own spans that use the run's ``traceparent`` are therefore their children. The root of a trace is an attempt
of a rollout, made from its summary, which is always recorded. Other spans, such as reads, are in a trace of the run.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from forebay.telemetry.attempts import Attempt, TraceLine, Writer
from forebay.telemetry.export import semantic_conventions as names
from forebay.telemetry.export.server_intervals import ServerIntervals, parts_of_read
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.records import (
    PHASES,
    LoopStall,
    Open,
    Read,
    RolloutSummary,
    Span,
    Weights,
)
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

Attributes = dict[str, Any]

_KNOWN = {
    "prompt": names.INPUT_TOKENS,
    "sampled": names.OUTPUT_TOKENS,
    "cached": names.CACHED_TOKENS,
    "model": names.REQUEST_MODEL,
    "provider": names.PROVIDER,
    "tool": names.TOOL_NAME,
    "error": names.ERROR_TYPE,
    "versions": names.WEIGHT_VERSIONS,
}
"""Names of recorded attributes, and the corresponding names in the conventions."""


class OtelSpans:
    """Converts traces to spans. Equal traces give equal spans, including ids."""

    def __init__(self) -> None:
        self._resources: dict[tuple[str, int], Resource] = {}
        self._open: dict[str, tuple[Writer, Open]] = {}
        """Spans outside rollouts that have not ended."""
        self._pauses = ServerIntervals()

    def of(self, db: TraceDB) -> "Iterator[ReadableSpan]":
        """All spans. A span that never ended lasts until the end of its attempt, or of the trace."""
        for group in db.groups():
            for attempts in db.rollouts([group.name]):
                for attempt in attempts:
                    yield from self._attempt(attempt)
        for line in db.of_run():
            yield from self._line(line)
        for writer, opened in self._open.values():
            yield self._open_span(writer, opened, db.last_ns)

    def _attempt(self, attempt: Attempt) -> "Iterator[ReadableSpan]":
        writer = attempt.writer
        if attempt.summary is not None:
            yield self._root(writer, attempt.summary)
        elif attempt.id:
            begin, lasted, uid = attempt.begin, attempt.end - attempt.begin, attempt.uid
            root = Span(name="attempt", t=begin, d=lasted, id=attempt.id, uid=uid, group=attempt.group)
            root.attempt = attempt.number
            yield self._span(writer, root, {names.IS_OPEN: True} if attempt.is_open else None)
        for own, span in attempt.spans:
            yield self._span(own, span) if isinstance(span, Span) else self._open_span(own, span, attempt.end)

    def _line(self, line: TraceLine) -> "Iterator[ReadableSpan]":
        writer, _, record = line
        match record:
            case Open():
                self._open[record.id] = writer, record
            case Span():
                self._open.pop(record.id, None)
                if record.name != "read" or writer.process != "server":  # those have a separate record
                    yield self._span(writer, record)
            case Read():
                self._open.pop(record.id, None)
                yield from self._read(writer, record)
            case LoopStall(has_ended=True):
                about = {names.OWN + "stack": record.stack}
                yield self._of_run(line, "event loop stood still", record.t, record.t + record.d, about)
            case Weights():
                yield from self._weights(line, record)

    def _open_span(self, writer: Writer, opened: Open, end: int) -> "ReadableSpan":
        fields = {name: getattr(opened, name) for name in opened.__struct_fields__}
        return self._span(writer, Span(**fields, d=max(0, end - opened.t)), {names.IS_OPEN: True})

    def _span(self, writer: Writer, span: Span, more: Mapping[str, Any] | None = None) -> "ReadableSpan":
        from opentelemetry.trace import SpanKind

        name, attributes = _described(span)
        about = {
            names.GROUP_ID: span.group,
            names.UID: span.uid,
            names.ATTEMPT: span.attempt if span.uid else None,
            names.TURN: span.turn,
            **attributes,
            **(more or {}),
        }
        kind = SpanKind.CLIENT if span.name == "engine" else SpanKind.INTERNAL
        ids = self._trace(writer, span.uid), span.id, span.up
        return self._make(writer, name, ids, (span.t, span.t + span.d), about, kind=kind, link=span.at.get("link"))

    def _root(self, writer: Writer, summary: RolloutSummary) -> "ReadableSpan":
        about = {
            names.GROUP_ID: summary.group,
            names.UID: summary.uid,
            names.INSTANCE_ID: str(summary.instance),
            names.EPOCH: summary.epoch,
            names.SLOT: summary.slot,
            names.ATTEMPT: summary.attempt,
            names.STEP: summary.step,
            names.REWARD: summary.reward,
            names.ENDING: summary.ending,
            names.OUTCOME: summary.outcome,
            names.WEIGHT_VERSIONS: list(dict.fromkeys(each for turn in summary.turns for each in turn.versions)),
            names.ERROR_TYPE: (summary.outcome or "failed") if summary.ending in ("failed", "retried") else "",
            names.OWN + "num_turns": len(summary.turns),
            names.OWN + "is_capped": summary.is_capped,
            names.OWN + "reward_cpu_s": summary.reward_cpu_s,
            names.OWN + "prompt_tokens": summary.prompt,
            names.OWN + "cached_tokens": summary.cached,
            names.OWN + "sampled_tokens": summary.sampled,
            **{f"{names.OWN}phase.{phase}_s": ns / 1e9 for phase, ns in summary.phases.items()},
        }
        ids = self._trace(writer, summary.uid), summary.id, ""
        return self._make(writer, "attempt", ids, (summary.t, summary.t + summary.d), about)

    def _read(self, writer: Writer, read: Read) -> "Iterator[ReadableSpan]":
        """One span for the whole read, and one for each of its parts."""
        parts = parts_of_read(read)
        end = parts[-1].end if parts else read.t
        about = {
            names.OWN + "trainer_step": read.step,
            names.OWN + "weight_version": read.weights,
            names.OWN + "released_by": read.by,
            names.OWN + "batch_id": read.batch,
            names.OWN + "num_groups": len(read.groups),
            names.OWN + "num_rows": read.num_rows,
            names.OWN + "num_bytes": read.num_bytes,
            names.OWN + "num_polls": read.num_polls,
            names.ERROR_TYPE: read.worst,
        }
        yield self._make(writer, "read", (self._trace(writer, ""), read.id, ""), (read.t, end), about)
        for part in parts:
            ids = self._trace(writer, ""), _derived_id(read.id, part.name), read.id
            yield self._make(writer, part.name, ids, (part.begin, part.end), {names.PHASE: part.name})

    def _weights(self, line: TraceLine, weights: Weights) -> "Iterator[ReadableSpan]":
        """An announcement takes no time; a pause ends with this record."""
        about = {names.OWN + "weight_version": weights.version}
        if weights.what == "announced":
            yield self._of_run(line, "weights announced", weights.t, weights.t, about)
        elif pause := self._pauses.of(weights):
            yield self._of_run(line, pause.name, pause.begin, pause.end, about)

    def _of_run(self, line: TraceLine, name: str, begin: int, end: int, about: Attributes) -> "ReadableSpan":
        """A span for something without an id."""
        ids = self._trace(line.writer, ""), _derived_id(line.writer.name, str(line.number)), ""
        return self._make(line.writer, name, ids, (begin, end), about)

    def _make(
        self,
        writer: Writer,
        name: str,
        ids: tuple[str, str, str],
        times: tuple[int, int],
        about: Attributes,
        *,
        kind: Any = None,
        link: Any = None,
    ) -> "ReadableSpan":
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode

        trace, span, up = ids
        linked = read_traceparent(link if isinstance(link, str) else None)
        error = about.get(names.ERROR_TYPE)
        return ReadableSpan(
            name=name,
            context=_context(trace, span),
            parent=_context(trace, up) if up else None,
            resource=self._resource(writer),
            attributes=_written({names.RUN_ID: _run_id(writer), **about}),
            links=[Link(_context(linked.trace_id, linked.span_id, is_remote=True))] if linked else [],
            kind=kind or SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, str(error)) if error else Status(StatusCode.UNSET),
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=InstrumentationScope("forebay", _own_version(), names.SCHEMA_URL),
        )

    @staticmethod
    def _trace(writer: Writer, uid: str) -> str:
        return trace_id(_run_id(writer), uid)

    def _resource(self, writer: Writer) -> "Resource":
        from opentelemetry.sdk.resources import Resource

        key = writer.process, writer.pid
        if key not in self._resources:
            base = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
            own: Attributes = {names.PROCESS: key[0], names.PROCESS_ID: key[1]} if writer.head else {}
            if str(base.attributes.get(names.SERVICE_NAME, "")).startswith("unknown_service"):
                own[names.SERVICE_NAME] = "forebay"
            self._resources[key] = base.merge(Resource(own))
        return self._resources[key]


def _run_id(writer: Writer) -> str:
    return writer.head.run_id if writer.head else ""


def _described(span: Span) -> tuple[str, Attributes]:
    """The span's name and attributes, with the names of the conventions."""
    if span.name == "engine":
        return _engine_call(span.at)
    if span.name == "tool":
        tool = str(span.at.get("tool") or "")
        about = {names.OPERATION: names.EXECUTE_TOOL, names.PHASE: span.name, **_renamed(span.at)}
        return f"{names.EXECUTE_TOOL} {tool}".rstrip(), about
    if span.name in PHASES:
        return span.name, {names.PHASE: span.name, **_renamed(span.at)}
    if span.name in ("turn", "attempt"):
        return span.name, _renamed(span.at)
    return span.name, dict(span.at)  # a user's span, with the user's names


def _engine_call(at: Mapping[str, Any]) -> tuple[str, Attributes]:
    host, port = _address(str(at.get("engine") or ""))
    reason = at.get("finish_reason")
    about = {
        names.OPERATION: names.CHAT,
        names.PROVIDER: names.DEFAULT_PROVIDER,
        names.PHASE: "engine",
        names.SERVER_ADDRESS: host,
        names.SERVER_PORT: port,
        names.FINISH_REASONS: [str(reason)] if reason else None,
        **_renamed({name: value for name, value in at.items() if name != "finish_reason"}),
    }
    return f"{names.CHAT} {at['model']}" if at.get("model") else names.CHAT, about


def _address(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.port if parts.hostname else None
    except ValueError:  # unbalanced brackets, or an invalid port
        return None, None


def _renamed(at: Mapping[str, Any]) -> Attributes:
    return {_KNOWN.get(name, names.OWN + name): value for name, value in at.items() if name != "link"}


def _written(about: Attributes) -> Attributes:
    """Drop unknown values, and convert the others to types of the protocol: text, number, flag, list of texts."""
    return {name: _value(value) for name, value in about.items() if value is not None and value not in ("", [])}


def _value(value: Any) -> Any:
    if isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return str(value)


def _context(trace: str, span: str, *, is_remote: bool = False) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace, 16), _span_number(span), is_remote, TraceFlags(TraceFlags.SAMPLED))


def _derived_id(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _span_number(span: str) -> int:
    try:
        return int(span, 16) & ((1 << 64) - 1)
    except ValueError:  # no writer of this package makes such an id
        return 0


@cache
def _own_version() -> str:
    try:
        return version("forebay")
    except PackageNotFoundError:
        return ""
