"""Converts trees of spans to finished OpenTelemetry spans, with the names of its semantic conventions.

An agent's own spans that use the run's ``traceparent`` are children of these. Each attempt of a rollout is the root of
a trace; everything outside rollouts is in a trace of the run. The GenAI names are from version 1.41.0, the last release
before they moved to a repository of their own, whatever version is installed.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from forebay.telemetry.attempts import Writer
from forebay.telemetry.export.span_trees import ExportSpan, SpanTree, span_trees
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.records import PHASES, SERVER_PHASES
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id

Attributes = dict[str, Any]
Content = Callable[[str, str, int], Sequence[Any]]
"""Returns the messages of an attempt, given its group, uid and number; none if they are not stored."""

_SCOPE = InstrumentationScope("forebay", version("forebay"), "https://opentelemetry.io/schemas/1.41.0")
_OWN = "rl."
"""Prefix of the names of Forebay's own attributes."""
_NAMES = {
    "prompt": "gen_ai.usage.input_tokens",
    "sampled": "gen_ai.usage.output_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "model": "gen_ai.request.model",
    "provider": "gen_ai.provider.name",
    "tool": "gen_ai.tool.name",
    "error": "error.type",
    "versions": "rl.weight_versions",
}
"""Names of recorded attributes, and the corresponding names in the conventions."""
_PHASES = {*PHASES, *SERVER_PHASES, "wait"}


def otel_spans(db: TraceDB, content: Content | None = None) -> Iterator[ReadableSpan]:
    """All spans; with ``content``, the roots of rollouts have their messages. Equal traces give equal spans and ids."""
    resource_of = cache(_resource)
    for tree in span_trees(db):
        for span in tree.spans:
            head = span.writer.head
            is_root = span is tree.spans[0] and tree.kind == "rollout"
            messages = content(span.group, span.uid, span.attempt) if content and is_root else ()
            yield _converted(tree, span, resource_of(head and (head.process, head.pid)), _conversation(messages))


def _conversation(messages: Sequence[Any]) -> Attributes:
    """The prompt, and everything from the first reply on, in the JSON form of the conventions."""
    chat = [message for message in messages if isinstance(message, dict)]
    first = next((at for at, message in enumerate(chat) if message.get("role") == "assistant"), len(chat))
    sides = {"gen_ai.input.messages": chat[:first], "gen_ai.output.messages": chat[first:]}
    return {name: json.dumps([*map(_in_parts, side)], ensure_ascii=False) for name, side in sides.items() if side}


def _in_parts(message: Mapping[str, Any]) -> Attributes:
    content, calls = message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    parts: list[Attributes] = []
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text})
    elif content:
        parts.append({"type": "text", "content": text})
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append({"type": "tool_call", "id": call.get("id"), **function})
    return {"role": message.get("role"), "parts": parts}


def _resource(process: tuple[str, int] | None) -> Resource:
    base = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    own: Attributes = {"rl.process": process[0], "process.pid": process[1]} if process else {}
    if str(base.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        own[SERVICE_NAME] = "forebay"
    return base.merge(Resource(own))


def _converted(tree: SpanTree, span: ExportSpan, resource: Resource, conversation: Attributes) -> ReadableSpan:
    name, own = _described(tree, span)
    about = {"rl.run_id": _run_id(span.writer), "rl.group_id": span.group, "rl.turn": span.turn, **own, **conversation}
    if span.uid:
        about |= {"rl.uid": span.uid, "rl.attempt": span.attempt}
    if span.is_open:
        about["rl.is_open"] = True
    trace = trace_id(_run_id(span.writer), span.uid)
    link = span.about.get("link")
    linked = read_traceparent(link if isinstance(link, str) else None)
    error = about.get("error.type")
    return ReadableSpan(
        name=name,
        context=_context(trace, span.id),
        parent=_context(trace, span.up) if span.up else None,
        resource=resource,
        attributes=_written(about),
        links=[Link(_context(linked.trace_id, linked.span_id, is_remote=True))] if linked else [],
        kind=SpanKind.CLIENT if span.name == "engine" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, str(error)) if error else Status(StatusCode.UNSET),
        start_time=span.begin,
        end_time=span.end,
        instrumentation_scope=_SCOPE,
    )


def _run_id(writer: Writer) -> str:
    return writer.head.run_id if writer.head else ""


def _described(tree: SpanTree, span: ExportSpan) -> tuple[str, Attributes]:
    """The span's name and attributes, with the names of the conventions."""
    at = span.about
    if span.name == "engine":
        return f"chat {at.get('model') or ''}".rstrip(), _of_call(at)
    if span.name == "tool":
        about = {"gen_ai.operation.name": "execute_tool", "rl.phase": "tool", **_renamed(at)}
        return f"execute_tool {at.get('tool') or ''}".rstrip(), about
    if span.name in _PHASES:
        return span.name, {"rl.phase": span.name, **_renamed(at)}
    if tree.kind not in ("rollout", "run") or span.name in ("turn", "attempt"):
        return span.name, _renamed(at)
    return span.name, dict(at)  # a user's span, with the user's names


def _of_call(at: Mapping[str, Any]) -> Attributes:
    host, port = _address(str(at.get("engine") or ""))
    reason = at.get("finish_reason")
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "rl.phase": "engine",
        "server.address": host,
        "server.port": port,
        "gen_ai.response.finish_reasons": [str(reason)] if reason else None,
        **_renamed({name: value for name, value in at.items() if name != "finish_reason"}),
    }


def _address(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.port if parts.hostname else None
    except ValueError:  # unbalanced brackets, or an invalid port
        return None, None


def _renamed(at: Mapping[str, Any]) -> Attributes:
    return {_NAMES.get(name, _OWN + name): value for name, value in at.items() if name != "link"}


def _written(about: Attributes) -> Attributes:
    """Drop unknown values, and convert the others to types of the protocol: text, number, flag, list of texts."""
    return {name: _value(value) for name, value in about.items() if value is not None and value not in ("", [])}


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    if isinstance(value, bool | float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        return value
    return str(value)


def _context(trace: str, span: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(trace, 16), _span_number(span), is_remote, TraceFlags(TraceFlags.SAMPLED))


def _span_number(span: str) -> int:
    try:
        return int(span, 16) & ((1 << 64) - 1)
    except ValueError:  # no writer of this package makes such an id
        return 0
