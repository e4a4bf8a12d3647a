"""What a run's buffer records in its trace: state changes of groups and batches, but not samples.

``Groups.open`` and ``Groups.move`` call ``group_changed``, and ``RunBuffer.record`` passes on every batch row: each
change passes one of the three. Times are from ``time.monotonic``, as in the whole trace.
"""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Literal, Protocol

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import BatchRow, Row
from forebay.core.run import Run
from forebay.telemetry.tracing.records import BatchChange, GroupChange, ProcessChange, Record, Span, Weights
from forebay.telemetry.tracing.trace_ids import is_kept, new_span_id
from forebay.telemetry.tracing.tracer import NO_TRACE

MAX_SEEN = 4_096
"""Number of batches whose last record is known. An older batch may be recorded twice."""


class TraceSink(Protocol):
    """Receives the records of one run: a ``Tracer``, or an object that opens one at the first record."""

    @property
    def rate(self) -> float:
        """Share of groups whose spans are kept."""
        ...

    def at(self, monotonic_s: float) -> int:
        """Convert a ``time.monotonic`` value to the trace's time."""
        ...

    def write(self, record: Record) -> None:
        """Accept a record; never blocks or raises."""
        ...


MakeTrace = Callable[[Run], TraceSink]


def no_trace(_: Run) -> TraceSink:
    """Return the sink of a buffer whose host traces nothing."""
    return NO_TRACE


class ChangeRecords:
    """Makes the records of one run while its ``RunBuffer`` is in use."""

    def __init__(self, sink: TraceSink) -> None:
        self._sink = sink
        self._seen: dict[str, tuple[BatchState, int | None]] = {}
        """Last recorded state and checkpoint by batch, because rows may contain nothing new."""

    def group_changed(self, group: SampleGroup, source: GroupState | None) -> None:
        """Record that a group has opened (``source`` None), or left the state ``source``."""
        row, now_s = group.row, monotonic()
        if row.state is not GroupState.READY:
            self._sink.write(
                GroupChange(
                    t=self._sink.at(now_s),
                    group=row.group_id,
                    state=row.state.value,
                    reason=row.reason,
                    batch=row.batch_id,
                )
            )
            return
        is_by_sample = source is GroupState.OPEN and not row.is_salvaged and group.last_sample_at_s > 0
        # It is judged at a read, which may be much later than its last sample.
        group.ready_at_s = group.last_sample_at_s if is_by_sample else now_s
        self._sink.write(
            GroupChange(
                t=self._sink.at(group.ready_at_s),
                group=row.group_id,
                state=row.state.value,
                reason="salvaged" if row.is_salvaged and source is GroupState.OPEN else "",
                batch=row.batch_id,
                last=group.samples[-1].row.uid if is_by_sample and group.samples else "",
                judged=self._sink.at(now_s),
            )
        )

    def rows_changed(self, rows: Iterable[Row]) -> None:
        """Record changes of batches among these rows, which are about to be stored."""
        for row in rows:
            if isinstance(row, BatchRow):
                self._batch_changed(row)

    def _batch_changed(self, row: BatchRow) -> None:
        now = (row.state, row.checkpoint_step)
        before = self._seen.get(row.batch_id, (BatchState.LEASED, None))
        if now == before:  # a read's own record includes the start of its lease
            return
        self._seen[row.batch_id] = now
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        t = self._sink.at(monotonic())
        if row.state is not before[0]:
            self._sink.write(BatchChange(t=t, batch=row.batch_id, state=row.state.value))
        if row.checkpoint_step is not None and row.checkpoint_step != before[1]:
            self._sink.write(BatchChange(t=t, batch=row.batch_id, state="checkpoint", checkpoint=row.checkpoint_step))

    def hooks_asked(self, stage: str, began_s: float, group_id: str = "", error: str = "") -> None:
        """Record that users' hooks, in their own process, ran from ``began_s`` until now."""
        rate = self._sink.rate
        if is_kept(group_id, rate) if group_id else rate > 0:
            t, at = self._sink.at(began_s), {"stage": stage} | ({"error": error} if error else {})
            span = Span(name="hooks", t=t, d=self._sink.at(monotonic()) - t, id=new_span_id(), group=group_id, at=at)
            self._sink.write(span)

    def weights_changed(self, what: Literal["announced", "paused", "resumed"], version: int | None = None) -> None:
        """Record that weights were announced, or that the engines were paused or resumed."""
        self._sink.write(Weights(t=self._sink.at(monotonic()), what=what, version=version))

    def process_changed(self, what: Literal["started", "ended", "failed", "restarted"]) -> None:
        """Record a start or an end of the run's process."""
        self._sink.write(ProcessChange(t=self._sink.at(monotonic()), what=what, process="run"))
