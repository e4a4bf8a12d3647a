"""What the gateway records of one run: of each session a turn for each chat, its waiting, and its engine calls."""

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
"""The span around another one."""


class OpenCalls:
    """Made in the event loop of the calls. ``pool`` are the engines that they go to."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._calls: set[CallSpan] = set()
        self._is_paused = False

    @contextmanager
    def call(self, trace: AttemptTrace, up: Up, engine_url: str, rid: str) -> Iterator[CallSpan]:
        """Around one request to an engine. Whoever reads its answer ends the span, an error does so at once."""
        call = CallSpan(trace, up, engine_url, rid, self._ask_load)
        call.note_paused(self._is_paused)
        self._calls.add(call)
        try:
            with call.failing():
                yield call
        finally:
            self._calls.discard(call)

    def note_paused(self, is_paused: bool) -> None:
        """The engines are paused for their weights, or go on."""
        self._is_paused = is_paused
        for call in self._calls:
            call.note_paused(is_paused)

    def _ask_load(self, span: SpanHandle) -> Mapping[str, Any] | None:
        return self._pool.ask_load(span, self._loop)


class Parent(NamedTuple):
    """What the ``traceparent`` of an agent's call comes to."""

    up: str | None = None
    """A span of our own trace: the call's parent."""
    link: str = ""
    """The header, where it is of another trace. By it both know of each other."""


class SessionTrace:
    """``attempt`` is the rollout's, ``is_unregistered`` if no run process of ours has opened it.

    ``held`` has the spans of a call until it is known which rollout it is of.
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
        """Where a call belongs that came with this header."""
        named = read_traceparent(traceparent)
        if named is None:
            return Parent()
        if named.trace_id == self._attempt.trace_id and self.held is None:
            return Parent(up=named.span_id)
        return Parent(link=(traceparent or "").strip())

    def begin_turn(self, parent: Parent) -> SpanHandle:
        """The agent asks."""
        at: dict[str, Any] = {"link": parent.link} if parent.link else {}
        return self._attempt.turn(next(self._numbers), up=parent.up, **at)

    def end_turn(self, turn: SpanHandle, choices: Sequence[Turn], error: BaseException | None) -> None:
        """The agent has its answer, made of ``choices``, or the call failed. Of an error its kind is recorded."""
        at: dict[str, Any] = {} if error is None else {"error": type(error).__name__}
        if choices:
            at["finish_reason"] = choices[0].finish_reason
        end_turn(turn, choices, **at)

    def end_call(self, choices: Sequence[Turn]) -> None:
        """A call is over. One without ``choices`` is in no sample."""
        if self.held is not None and not choices:
            self.held.release()

    @contextmanager
    def engine_wait(self, up: Up) -> Iterator[None]:
        """Until an engine answers, and it is known what to ask it for."""
        with ended(self._attempt.begin("engine_wait", up=up)):
            yield

    def engine_call(self, up: Up, engine_url: str, rid: str) -> AbstractContextManager[CallSpan]:
        """Around one request to an engine. Whoever reads its answer ends the span, an error does so at once."""
        return self._calls.call(self._attempt, up, engine_url, rid)

    def turns(self) -> list[dict[str, Any]]:
        """The turns so far, each a ``TurnSummary`` as JSON."""
        return [msgspec.to_builtins(turn) for turn in self._attempt.turns()]

    def end(self, ending: str, *, is_last: bool = True) -> None:
        """The rollout is over. One that no run process of ours has opened gets its summary."""
        if self._is_unregistered:
            uid, begun = self._attempt.uid, self._attempt.begun
            self._attempt.summary(ending=ending, is_last=is_last, instance=uid, started=begun, step=self._step)


class GatewayTrace:
    """Records one run for as long as the gateway knows it. Standstills of the loop, as ``watch`` sees them, too."""

    def __init__(self, run_id: str, options: TraceOptions | None, pool: EnginePool, watch: StallWatch) -> None:
        self.step = 0
        """How many weight versions were announced."""
        self.calls = OpenCalls(pool)
        self.tracer = NO_TRACE
        self._run_id = run_id
        self._watch = watch
        self._tracers: list[Tracer] = []
        self.take(options)

    def take(self, options: TraceOptions | None) -> None:
        """Record from here on as ``options`` say: another start of the run has files of its own."""
        if options is None:
            self.tracer = NO_TRACE
            return
        self.tracer = start_tracing(TraceSettings(**options.model_dump()), "gateway")
        # Those before are kept open: rollouts that began under them go on.
        if self.tracer not in self._tracers:
            self._tracers.append(self.tracer)
            self._watch.add(self.tracer.note_stall)

    async def close(self) -> None:
        """Write what is there, and nothing more."""
        for tracer in self._tracers:
            self._watch.remove(tracer.note_stall)
            await asyncio.to_thread(tracer.close)

    def opened(self, body: OpenRollout) -> SessionTrace:
        """The trace of a rollout: below the attempt of the run process that opens it, if that is one of ours."""
        parent, (uid, _, number) = read_traceparent(body.traceparent), body.rollout_id.rpartition("-")
        if parent is not None and parent.trace_id == trace_id(self._run_id, uid):
            group = uid.removeprefix(f"{self._run_id}-").rpartition("-")[0]
            with suppress(ValueError):
                attempt = self.tracer.attempt(uid, group, int(number, 16), id=parent.span_id)
                return SessionTrace(self.calls, attempt)
        name = body.rollout_id
        return SessionTrace(self.calls, self.tracer.attempt(name, name, 0), step=self.step, is_unregistered=True)

    def captured(self) -> SessionTrace:
        """The trace of one call of a generator that knows nothing of us: of which rollout it is turns out later."""
        if self.tracer is NO_TRACE:
            return SessionTrace(self.calls, NO_ATTEMPT)
        held = CallSpans(self.tracer, self.step)
        return SessionTrace(self.calls, held.begin(), held=held)
