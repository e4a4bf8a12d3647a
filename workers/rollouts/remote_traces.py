"""Traces of rollouts that run in workers: the lead's part, and the transfer from workers without the run's folder."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.records import Head, Record, RolloutSummary
from forebay.telemetry.tracing.run_tracer import Tracer, TraceSettings, trace_file_of
from forebay.telemetry.tracing.spans import Scope
from forebay.telemetry.tracing.trace_file import TraceFile
from forebay.telemetry.tracing.tracer import run_tracer
from forebay.workers.rollouts.orders import Span, TraceLines

logger = logging.getLogger(__name__)


class RemoteAttempt(AttemptTrace):
    """The waits of an attempt. Its worker writes the summary, unless no worker took it or that worker is gone."""

    def __init__(self, tracer: "RemoteTracer", uid: str, group: str, attempt: int, begun: int | None) -> None:
        super().__init__(tracer, uid=uid, group=group, attempt=attempt, begun=begun, is_kept=False)
        self.worker: int | None = None
        """Number of the worker that runs it."""
        self._tracer = tracer

    def waited(self) -> tuple[str, int, list[Span]]:
        """Its id, its age, and its waits so far, in nanoseconds."""
        now = self.now()
        spans = [(name, int(begun) - self.begun, int(end - begun)) for name, begun, end, _, _ in self._collected]
        return self.id, now - self.begun, spans

    def phases(self, until: int | None = None) -> dict[str, int]:  # noqa: ARG002 - the worker knows them all
        """Always empty: the worker puts the phases into the sample."""
        return {}

    def summary(self, *, until: int | None = None, **fields: Any) -> RolloutSummary:
        """End the attempt; writes a summary only if its worker does not."""
        if self.worker is not None and fields.get("ending") != "lost":
            return RolloutSummary(t=0, d=0, id="", uid=self.uid, group=self.group, instance="")
        # The worker's records of it, up to the worker's end, have the same span as parent.
        known_as = "" if self.worker is None else self.id
        own = self._tracer.own.attempt(self.uid, self.group, self.attempt, self.begun, known_as)
        for name, begun, end, _, _ in self._collected:
            own.add(name, int(begun), int(end - begun))
        return own.summary(until=until, **fields, **({} if self.worker is None else {"worker": self.worker}))


class RemoteTracer(Tracer):
    """Makes ``RemoteAttempt`` objects on top of the lead's ``own`` tracer."""

    def __init__(self, own: Tracer) -> None:
        super().__init__(TraceSettings(folder="", run_id=own.run_id, max_bytes=0), "run")
        self.own = own

    def now(self) -> int:
        """Current time of ``own``."""
        return self.own.now()

    def at(self, monotonic_s: float) -> int:
        """Time of ``own`` at this monotonic time."""
        return self.own.at(monotonic_s)

    def write(self, record: Record) -> None:
        """Write a record that belongs to no attempt."""
        self.own.write(record)

    def watch(self, scope: Scope) -> None:
        """Do nothing: long scopes run in the workers."""

    def attempt(
        self,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002, ARG002 - signature of the base class
    ) -> AttemptTrace:
        """The trace of one attempt of a rollout."""
        return RemoteAttempt(self, uid, group, attempt, begun)


def remote_attempt(trace: RolloutTrace) -> RemoteAttempt:
    """The current attempt of a rollout of the lead."""
    assert isinstance(trace.attempt, RemoteAttempt)
    return trace.attempt


class SentTrace(TraceFile):
    """Instead of a file of a worker's tracer: sends the lines to the lead."""

    def __init__(self, head: Head, send: Callable[[TraceLines], None]) -> None:
        self._encoded_head, self._send = msgspec.json.encode(head), send

    def append(self, lines: bytes) -> None:
        """Send whole lines."""
        self._send(TraceLines(self._encoded_head, lines))

    def close(self) -> None:
        """Do nothing: no file is open."""


class ReceivedTrace:
    """One worker's trace in the lead, written to files like those that workers on this machine write."""

    def __init__(self) -> None:
        self._file: TraceFile | None = None
        self._is_over = False

    def append(self, lines: TraceLines) -> None:
        """Write lines. An error ends the trace; rollouts are not affected."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._file = trace_file_of(run_tracer().settings, msgspec.json.decode(lines.head, type=Head))
            self._file.append(lines.lines)
        except Exception as error:  # noqa: BLE001 - usually a full disk
            self._is_over = True
            logger.warning("cannot write the trace of a worker, so it ends here; its rollouts continue: %s", error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
