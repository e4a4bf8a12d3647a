"""Our records as finished OpenTelemetry spans, with the ids under which they were recorded.

An agent's own spans, which have our ``traceparent``, are therefore their children. The root of a trace is an attempt of
a rollout: made of its summary, which is always there. What belongs to no rollout, reads say, is in a trace of the run.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from forebay.telemetry.export import semantic_conventions as names
from forebay.telemetry.export.server_intervals import ServerIntervals, parts_of_read
from forebay.telemetry.tracing.read_trace import TraceLine
from forebay.telemetry.tracing.records import (
    PHASES,
    Head,
    LoopStall,
    Open,
    Read,
    Record,
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
"""What we call it, and what the conventions do."""


class OtelSpans:
    """Makes spans of records, file by file. The same log makes the same spans, ids included."""

    def __init__(self) -> None:
        self._files: dict[str, Head] = {}
        self._resources: dict[tuple[str, int], Resource] = {}
        self._open: dict[str, tuple[TraceLine, Open]] = {}
        self._roots: dict[str, tuple[TraceLine, Span]] = {}
        """Attempts whose summary has not come yet."""
        self._pauses = ServerIntervals()
        self._last_ns = 0

    def of(self, line: TraceLine) -> "Iterator[ReadableSpan]":
        """The finished spans that one more line brings: often none, of a read several."""
        record = line.record
        self._note_time(record)
        match record:
            case Head():
                self._files[line.file] = record
            case Open():
                self._open[record.id] = line, record
            case Span(name="attempt"):
                self._roots[record.id] = line, record
            case Span():
                self._open.pop(record.id, None)
                if not self._is_read(line, record):  # of which there is a record of its own
                    yield self._span(line.file, record)
            case RolloutSummary():
                self._roots.pop(record.id, None)
                self._open.pop(record.id, None)
                yield self._root(line.file, record)
            case Read():
                yield from self._read(line.file, record)
            case LoopStall(has_ended=True):
                about = {names.OWN + "stack": record.stack}
                yield self._of_run(line, "event loop stood still", record.t, record.t + record.d, about)
            case Weights():
                yield from self._weights(line, record)

    def rest(self) -> "Iterator[ReadableSpan]":
        """At the end of the log: what never ended, up to there, and attempts that have no summary."""
        for line, span in self._roots.values():
            self._open.pop(span.id, None)
            yield self._span(line.file, span)
        for line, opened in self._open.values():
            lasted = max(0, self._last_ns - opened.t)
            fields = {name: getattr(opened, name) for name in opened.__struct_fields__}
            yield self._span(line.file, Span(**{**fields, "d": lasted}), {names.IS_OPEN: True})
        self._roots.clear()
        self._open.clear()

    def _is_read(self, line: TraceLine, span: Span) -> bool:
        head = self._files.get(line.file)
        return span.name == "read" and head is not None and head.process == "server"

    def _note_time(self, record: Record) -> None:
        if not isinstance(record, Head):
            self._last_ns = max(self._last_ns, record.t + getattr(record, "d", 0))

    def _span(self, file: str, span: Span, more: Mapping[str, Any] | None = None) -> "ReadableSpan":
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
        ids = self._trace(file, span.uid), span.id, span.up
        return self._make(file, name, ids, (span.t, span.t + span.d), about, kind=kind, link=span.at.get("link"))

    def _root(self, file: str, summary: RolloutSummary) -> "ReadableSpan":
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
        ids = self._trace(file, summary.uid), summary.id, ""
        return self._make(file, "attempt", ids, (summary.t, summary.t + summary.d), about)

    def _read(self, file: str, read: Read) -> "Iterator[ReadableSpan]":
        """One span for all of it, and one for each of its parts."""
        self._open.pop(read.id, None)
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
        yield self._make(file, "read", (self._trace(file, ""), read.id, ""), (read.t, end), about)
        for part in parts:
            ids = self._trace(file, ""), _derived_id(read.id, part.name), read.id
            yield self._make(file, part.name, ids, (part.begin, part.end), {names.PHASE: part.name})

    def _weights(self, line: TraceLine, weights: Weights) -> "Iterator[ReadableSpan]":
        """An announcement takes no time, a pause ends with this record."""
        about = {names.OWN + "weight_version": weights.version}
        if weights.what == "announced":
            yield self._of_run(line, "weights announced", weights.t, weights.t, about)
        elif pause := self._pauses.of(weights):
            yield self._of_run(line, pause.name, pause.begin, pause.end, about)

    def _of_run(self, line: TraceLine, name: str, begin: int, end: int, about: Attributes) -> "ReadableSpan":
        """Something that has no id of its own."""
        ids = self._trace(line.file, ""), _derived_id(line.file, str(line.number)), ""
        return self._make(line.file, name, ids, (begin, end), about)

    def _make(
        self,
        file: str,
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
            resource=self._resource(file),
            attributes=_written({names.RUN_ID: self._run_id(file), **about}),
            links=[Link(_context(linked.trace_id, linked.span_id, is_remote=True))] if linked else [],
            kind=kind or SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, str(error)) if error else Status(StatusCode.UNSET),
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=InstrumentationScope("forebay", _own_version(), names.SCHEMA_URL),
        )

    def _run_id(self, file: str) -> str:
        head = self._files.get(file)
        return head.run_id if head else ""

    def _trace(self, file: str, uid: str) -> str:
        return trace_id(self._run_id(file), uid)

    def _resource(self, file: str) -> "Resource":
        from opentelemetry.sdk.resources import Resource

        head = self._files.get(file)
        key = (head.process, head.pid) if head else ("", 0)
        if key not in self._resources:
            base = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
            own: Attributes = {names.PROCESS: key[0], names.PROCESS_ID: key[1]} if head else {}
            if str(base.attributes.get(names.SERVICE_NAME, "")).startswith("unknown_service"):
                own[names.SERVICE_NAME] = "forebay"
            self._resources[key] = base.merge(Resource(own))
        return self._resources[key]


def _described(span: Span) -> tuple[str, Attributes]:
    """The span's name, and its own attributes, in the words of the conventions."""
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
    return span.name, dict(span.at)  # a user's: with the names that the user gave


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
    except ValueError:  # brackets that do not match, a port that is none
        return None, None


def _renamed(at: Mapping[str, Any]) -> Attributes:
    return {_KNOWN.get(name, names.OWN + name): value for name, value in at.items() if name != "link"}


def _written(about: Attributes) -> Attributes:
    """Without what is not known, and with values that the protocol has: texts, numbers, flags, lists of texts."""
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
    except ValueError:  # no writer of ours gives such an id
        return 0


@cache
def _own_version() -> str:
    try:
        return version("forebay")
    except PackageNotFoundError:
        return ""
