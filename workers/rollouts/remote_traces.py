"""Traces of rollouts that run in workers: as the lead has them, and as workers without the run's folder send them."""

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
    """What an attempt has waited for. Its summary is the worker's, unless it came to none, or its worker is gone."""

    def __init__(self, tracer: "RemoteTracer", uid: str, group: str, attempt: int, begun: int | None) -> None:
        super().__init__(tracer, uid=uid, group=group, attempt=attempt, begun=begun, is_kept=False)
        self.worker: int | None = None
        """In which it runs."""
        self._tracer = tracer

    def waited(self) -> tuple[str, int, list[Span]]:
        """Its id, how long ago it was begun, and what has been waited for since, in nanoseconds."""
        now = self.now()
        spans = [(name, int(begun) - self.begun, int(end - begun)) for name, begun, end, _, _ in self._collected]
        return self.id, now - self.begun, spans

    def phases(self, until: int | None = None) -> dict[str, int]:  # noqa: ARG002 - the worker knows them all
        """None: they are not put into the sample here."""
        return {}

    def summary(self, *, until: int | None = None, **fields: Any) -> RolloutSummary:
        """End it here."""
        if self.worker is not None and fields.get("ending") != "lost":
            return RolloutSummary(t=0, d=0, id="", uid=self.uid, group=self.group, instance="")
        # What the worker has recorded of it before its end is below the same span.
        known_as = "" if self.worker is None else self.id
        own = self._tracer.own.attempt(self.uid, self.group, self.attempt, self.begun, known_as)
        for name, begun, end, _, _ in self._collected:
            own.add(name, int(begun), int(end - begun))
        return own.summary(until=until, **fields, **({} if self.worker is None else {"worker": self.worker}))


class RemoteTracer(Tracer):
    """Makes these, over the tracer that is the lead's ``own``."""

    def __init__(self, own: Tracer) -> None:
        super().__init__(TraceSettings(folder="", run_id=own.run_id, max_bytes=0), "run")
        self.own = own

    def now(self) -> int:
        """As its own has it."""
        return self.own.now()

    def at(self, monotonic_s: float) -> int:
        """As above."""
        return self.own.at(monotonic_s)

    def write(self, record: Record) -> None:
        """What belongs to no attempt."""
        self.own.write(record)

    def watch(self, scope: Scope) -> None:
        """What lasts long lasts elsewhere."""

    def attempt(
        self,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002, ARG002 - as its base has it
    ) -> AttemptTrace:
        """Of one rollout."""
        return RemoteAttempt(self, uid, group, attempt, begun)


def remote_attempt(trace: RolloutTrace) -> RemoteAttempt:
    """The present attempt of a rollout of the lead."""
    assert isinstance(trace.attempt, RemoteAttempt)
    return trace.attempt


class SentTrace:
    """In the worker, what its tracer has in place of a ``TraceFile``."""

    def __init__(self, head: Head, send: Callable[[TraceLines], None]) -> None:
        self._head, self._send = msgspec.json.encode(head), send

    def append(self, lines: bytes) -> None:
        """Send whole lines."""
        self._send(TraceLines(self._head, lines))

    def close(self) -> None:
        """Nothing is open here."""


class ReceivedTrace:
    """In the lead: one worker's, as files of its own, like those that workers of this machine write."""

    def __init__(self) -> None:
        self._file: TraceFile | None = None
        self._is_over = False

    def append(self, lines: TraceLines) -> None:
        """Write them. What goes wrong ends the trace, and costs no rollout."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._file = trace_file_of(run_tracer().settings, msgspec.json.decode(lines.head, type=Head))
            self._file.append(lines.lines)
        except Exception as error:  # noqa: BLE001 - a full disk, as a rule
            self._is_over = True
            logger.warning("the trace of a worker ends here, its rollouts go on: %s", error)

    def close(self) -> None:
        """No more will come."""
        if self._file is not None:
            self._file.close()
