"""Starts tracing: one tracer per run in each process. Provides ``span`` and ``traceparent`` for user code.

``start_tracing`` opens no file before the first record. Without tracing, use ``NO_TRACE``, which accepts everything
and keeps nothing.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import msgspec

from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.records import Process, RolloutSummary
from forebay.telemetry.tracing.run_tracer import OpenFile, Tracer, TraceSettings, trace_file_of
from forebay.telemetry.tracing.spans import Scope, SpanHandle, current_span
from forebay.telemetry.tracing.trace_ids import is_kept, read_traceparent

__all__ = [
    "NO_ATTEMPT",
    "NO_SPAN",
    "NO_TRACE",
    "AttemptTrace",
    "NoAttempt",
    "SpanHandle",
    "TraceSettings",
    "Tracer",
    "run_tracer",
    "span",
    "start_tracing",
    "trace_environment",
    "traceparent",
]

TRACE_VARIABLE = "FOREBAY_TRACE"
"""The variable that says where a child process of a run records: an ``InheritedTrace`` as JSON."""
PARENT_VARIABLE = "TRACEPARENT"
"""The variable with the parent span. Name and format are OpenTelemetry's."""


class InheritedTrace(TraceSettings, omit_defaults=True):
    """The content of ``TRACE_VARIABLE``. Without a ``uid`` the process belongs to the run, not to a rollout."""

    uid: str = ""
    group: str = ""
    attempt: int = 0


def start_tracing(settings: TraceSettings, process: Process, open_file: OpenFile = trace_file_of) -> Tracer:
    """The tracer of the run in this process. Repeated calls return the same one.

    In a run process, ``span`` uses it outside rollouts. Child processes find it in their environment, unless
    ``open_file`` writes the lines elsewhere than to the run's folder.
    """
    return _TRACES.start(settings, process, open_file)


def run_tracer() -> Tracer:
    """The tracer of the run to which this process belongs; ``NO_TRACE`` without tracing."""
    _TRACES.of_run()
    return _TRACES.run_tracer or NO_TRACE


def span(name: str, /, **at: Any) -> SpanHandle:
    """A span in your own code: ``with span("parse", bytes=len(text)): …``.

    Works in any thread, task and process of a run. Within a rollout it belongs to the current turn, otherwise to the
    run. It is the parent of spans opened inside. Without tracing it does nothing. ``.set(**at)`` adds attributes.
    """
    current = current_span.get()
    if current is not None:
        return current.scope.begin_inside(current, name, at)
    return _TRACES.of_run().begin(name, **at)


def traceparent() -> str | None:
    """The W3C ``traceparent`` of the current span, for requests to other services; None without tracing."""
    current = current_span.get()
    if current is not None:
        return current.traceparent or None
    return os.environ.get(PARENT_VARIABLE) if _TRACES.of_run() is not NO_ATTEMPT else None


def trace_environment() -> dict[str, str]:
    """Environment variables for a command, so that ``span`` works there, too, below the current span."""
    current = current_span.get()
    tracer = _TRACES.run_tracer
    if current is None or tracer is None or not isinstance(scope := current.scope, Scope):
        return {}
    known = msgspec.structs.asdict(tracer.settings)
    inherited = InheritedTrace(**known, uid=scope.uid, group=scope.group, attempt=scope.attempt)
    return {TRACE_VARIABLE: msgspec.json.encode(inherited).decode(), PARENT_VARIABLE: current.traceparent}


class _Traces:
    """The traces of this process."""

    def __init__(self) -> None:
        self.run_tracer: Tracer | None = None
        self._tracers: dict[tuple[str, int, Process], Tracer] = {}
        self._run_scope: Scope | None = None

    def start(self, settings: TraceSettings, process: Process, open_file: OpenFile) -> Tracer:
        key = (settings.run_id, settings.start, process)
        tracer = self._tracers.get(key)
        if tracer is None:
            tracer = self._tracers[key] = Tracer(settings, process, open_file)
            tracer.on_close = self._forget
            if process == "run":
                self.run_tracer, self._run_scope = tracer, tracer.run_scope()
                if open_file is trace_file_of:
                    os.environ[TRACE_VARIABLE] = msgspec.json.encode(settings).decode()
        return tracer

    def of_run(self) -> Scope:
        """The scope of spans outside rollouts."""
        if self._run_scope is None:
            self._run_scope = self._inherited() or NO_ATTEMPT
        return self._run_scope

    def _inherited(self) -> Scope | None:
        """The scope described by the environment, in a child process of a run."""
        try:
            inherited = msgspec.json.decode(os.environ.get(TRACE_VARIABLE, ""), type=InheritedTrace)
        except msgspec.MsgspecError:
            return None
        self.run_tracer = tracer = Tracer(inherited, "run")
        parent = read_traceparent(os.environ.get(PARENT_VARIABLE))
        return Scope(
            tracer,
            uid=inherited.uid,
            group=inherited.group,
            attempt=inherited.attempt,
            up=parent.span_id if parent is not None and inherited.uid else "",
            is_kept=is_kept(inherited.group, tracer.rate) if inherited.group else tracer.rate > 0,
        )

    def _forget(self, tracer: Tracer) -> None:
        self._tracers = {key: each for key, each in self._tracers.items() if each is not tracer}
        if tracer is self.run_tracer:
            self.run_tracer = self._run_scope = None
            os.environ.pop(TRACE_VARIABLE, None)


def _method(result: Callable[[], Any]) -> Callable[..., Any]:
    """A method that takes everything and keeps nothing, so that callers need no ``if`` without tracing."""
    return lambda *_, **__: result()


class _NoSpan(SpanHandle):
    """A shared span without state."""

    traceparent = ""
    set = end = note_open = __setattr__ = __exit__ = _method(lambda: None)

    def __enter__(self) -> Self:
        return self


class NoAttempt(AttemptTrace):
    """Drops everything recorded of the attempt."""

    traceparent = ""
    begin = turn = _method(lambda: NO_SPAN)
    add = know_as = take_over = _method(lambda: None)
    activate = _method(nullcontext)
    turns, phases = _method(list), _method(dict)

    def summary(self, **fields: Any) -> RolloutSummary:
        fields.pop("until", None)
        known = {"t": 0, "d": 0, "id": "", "uid": "", "group": "", "instance": ""}
        return RolloutSummary(**{**known, **fields})


class _NoTracer(Tracer):
    """Does not even read the clock."""

    attempt = run_scope = _method(lambda: NO_ATTEMPT)
    write = watch = close = _method(lambda: None)


NO_TRACE: Tracer = _NoTracer(TraceSettings(folder="", run_id="", max_bytes=0), "run")
NO_ATTEMPT: AttemptTrace = NoAttempt(NO_TRACE, uid="", group="", attempt=0, is_kept=False)
NO_SPAN: SpanHandle = _NoSpan(NO_ATTEMPT, "", "", "", None, 0, {})
_TRACES = _Traces()
