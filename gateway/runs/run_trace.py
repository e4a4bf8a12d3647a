"""What the gateway records of one run: a trace for each session, and who ends them with the run."""

import asyncio
from contextlib import suppress

from forebay.engines.ring import EngineRing
from forebay.gateway.request_bodies import OpenRollout, TraceOptions
from forebay.gateway.runs.foreign_traces import HeldCall
from forebay.gateway.runs.open_calls import OpenCalls
from forebay.gateway.runs.session_trace import SessionTrace
from forebay.telemetry.tracing.loop_watch import LoopWatch
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id
from forebay.telemetry.tracing.tracer import NO_ATTEMPT, NO_TRACE, Tracer, TraceSettings, start_tracing


class GatewayTrace:
    """Records one run for as long as the gateway knows it. Standstills of the loop, as ``watch`` sees them, too."""

    def __init__(self, run_id: str, options: TraceOptions | None, ring: EngineRing, watch: LoopWatch) -> None:
        self.step = 0
        """How many weight versions were announced."""
        self.calls = OpenCalls(ring)
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
            self._watch.add(self.tracer)

    async def close(self) -> None:
        """Write what is there, and nothing more."""
        for tracer in self._tracers:
            self._watch.remove(tracer)
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
        return SessionTrace(self.calls, self.tracer.attempt(name, name, 0), step=self.step, is_foreign=True)

    def captured(self) -> SessionTrace:
        """The trace of one call of a generator that knows nothing of us: of which rollout it is turns out later."""
        if self.tracer is NO_TRACE:
            return SessionTrace(self.calls, NO_ATTEMPT)
        held = HeldCall(self.tracer, self.step)
        return SessionTrace(self.calls, held.begin(), held=held)
