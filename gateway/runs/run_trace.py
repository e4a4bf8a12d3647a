"""The gateway's trace of one run: for each session its turns (one per chat), waiting times and engine calls."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple

import msgspec

from forebay.engines.capture.call_spans import CallSpan, end_turn, ended
from forebay.engines.capture.turn import Turn
from forebay.engines.pool import EnginePool
from forebay.gateway.request_bodies import OpenRollout, TraceOptions
from forebay.gateway.runs.captured_traces import CallSpans
from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.spans import SpanHandle
from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id
from forebay.telemetry.tracing.tracer import NO_ATTEMPT, NO_TRACE, Tracer, TraceSettings, start_tracing

Up = SpanHandle | str | None
"""The parent of a span."""


class OpenCalls:
    """Engine calls in flight. Create it in their event loop. ``pool`` are the engines that they use."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._calls: set[CallSpan] = set()
        self._is_paused = False

    @contextmanager
    def call(self, trace: AttemptTrace, up: Up, engine_url: str, rid: str) -> Iterator[CallSpan]:
        """Trace one request to an engine. The reader of its reply ends the span; an error ends it at once."""
        call = CallSpan(trace, up, engine_url, rid, self._ask_load)
        call.note_paused(self._is_paused)
        self._calls.add(call)
        try:
            with call.failing():
                yield call
        finally:
            self._calls.discard(call)

    def note_paused(self, is_paused: bool) -> None:
        """Record that the engines were paused for new weights, or resumed."""
        self._is_paused = is_paused
        for call in self._calls:
            call.note_paused(is_paused)

    def _ask_load(self, span: SpanHandle) -> Mapping[str, Any] | None:
        return self._pool.ask_load(span, self._loop)


class Parent(NamedTuple):
    """The meaning of the ``traceparent`` of an agent's call."""

    up: str | None = None
    """The call's parent, if it is a span of our own trace."""
    link: str = ""
    """The header, if it belongs to another trace; it links both traces."""


class SessionTrace:
    """The trace of a session. ``attempt`` is its rollout's; ``is_unregistered`` if no run process of ours opened it.

    ``held`` has the spans of a call until its rollout is known.
    """

    def __init__(
        self,
        calls: OpenCalls,
        attempt: AttemptTrace,
        *,
        step: int = 0,
        is_unregistered: bool = False,
        held: CallSpans | None = None,
    ) -> None:
        self.held = held
        self._calls = calls
        self._attempt = attempt
        self._step = step
        self._is_unregistered = is_unregistered
        self._numbers = count()

    def parent(self, traceparent: str | None) -> Parent:
        """Return the parent of a call with this header."""
        named = read_traceparent(traceparent)
        if named is None:
            return Parent()
        if named.trace_id == self._attempt.trace_id and self.held is None:
            return Parent(up=named.span_id)
        return Parent(link=(traceparent or "").strip())

    def begin_turn(self, parent: Parent) -> SpanHandle:
        """Begin the turn of an agent's chat."""
        at: dict[str, Any] = {"link": parent.link} if parent.link else {}
        return self._attempt.turn(next(self._numbers), up=parent.up, **at)

    def end_turn(self, turn: SpanHandle, choices: Sequence[Turn], error: BaseException | None) -> None:
        """End a turn with its ``choices``, or with the type of the error."""
        at: dict[str, Any] = {} if error is None else {"error": type(error).__name__}
        if choices:
            at["finish_reason"] = choices[0].finish_reason
        end_turn(turn, choices, **at)

    def end_call(self, choices: Sequence[Turn]) -> None:
        """End a call. A call without ``choices`` is in no sample."""
        if self.held is not None and not choices:
            self.held.release()

    @contextmanager
    def engine_wait(self, up: Up) -> Iterator[None]:
        """Trace the wait until an engine answers and the request can be sent."""
        with ended(self._attempt.begin("engine_wait", up=up)):
            yield

    def engine_call(self, up: Up, engine_url: str, rid: str) -> AbstractContextManager[CallSpan]:
        """Trace one request to an engine. The reader of its reply ends the span; an error ends it at once."""
        return self._calls.call(self._attempt, up, engine_url, rid)

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns so far, each a ``TurnSummary`` as JSON."""
        return [msgspec.to_builtins(turn) for turn in self._attempt.turns()]

    def end(self, ending: str, *, is_last: bool = True) -> None:
        """End the rollout. A rollout that no run process of ours opened gets its summary here."""
        if self._is_unregistered:
            uid, begun = self._attempt.uid, self._attempt.begun
            self._attempt.summary(ending=ending, is_last=is_last, instance=uid, started=begun, step=self._step)


class GatewayTrace:
    """Traces one run while the gateway knows it, including stalls of the event loop detected by ``watch``."""

    def __init__(self, run_id: str, options: TraceOptions | None, pool: EnginePool, watch: StallWatch) -> None:
        self.step = 0
        """Number of weight versions announced."""
        self.calls = OpenCalls(pool)
        self.tracer = NO_TRACE
        self._run_id = run_id
        self._watch = watch
        self._tracers: list[Tracer] = []
        self.take(options)

    def take(self, options: TraceOptions | None) -> None:
        """Trace from now on with ``options``: each start of the run has its own files."""
        if options is None:
            self.tracer = NO_TRACE
            return
        self.tracer = start_tracing(TraceSettings(**options.model_dump()), "gateway")
        # Earlier tracers stay open for the rollouts that began with them.
        if self.tracer not in self._tracers:
            self._tracers.append(self.tracer)
            self._watch.add(self.tracer.note_stall)

    async def close(self) -> None:
        """Write what is pending and stop tracing."""
        for tracer in self._tracers:
            self._watch.remove(tracer.note_stall)
            await asyncio.to_thread(tracer.close)

    def opened(self, body: OpenRollout) -> SessionTrace:
        """Return the trace of a rollout, as a child of the attempt in the run process if one of ours opened it."""
        parent, (uid, _, number) = read_traceparent(body.traceparent), body.rollout_id.rpartition("-")
        if parent is not None and parent.trace_id == trace_id(self._run_id, uid):
            group = uid.removeprefix(f"{self._run_id}-").rpartition("-")[0]
            with suppress(ValueError):
                attempt = self.tracer.attempt(uid, group, int(number, 16), id=parent.span_id)
                return SessionTrace(self.calls, attempt)
        name = body.rollout_id
        return SessionTrace(self.calls, self.tracer.attempt(name, name, 0), step=self.step, is_unregistered=True)

    def captured(self) -> SessionTrace:
        """Return the trace of one call of a generator that does not know the gateway; its rollout is found later."""
        if self.tracer is NO_TRACE:
            return SessionTrace(self.calls, NO_ATTEMPT)
        held = CallSpans(self.tracer, self.step)
        return SessionTrace(self.calls, held.begin(), held=held)
