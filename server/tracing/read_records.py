"""Records of trainers' reads: when asked, which group satisfied it, when judged, first and last byte.

A trainer that polls waits from its first poll: polls without groups, and the one that returns some, are one read.
"""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from forebay.buffer.change_records import TraceSink
from forebay.buffer.reads.delivery import Delivery, LeasedBatch
from forebay.buffer.reads.selection import ReadRequest
from forebay.core.errors import ForebayError, RunEnded
from forebay.telemetry.tracing.records import Open, Read, Span
from forebay.telemetry.tracing.trace_ids import new_span_id

SAME_WAIT_S = 120.0
"""An empty poll and the next one within this time belong to one wait: slime's client may pause for a minute."""
NOTED_AFTER_S = 10.0
"""A wait longer than this is recorded while it lasts."""

NOTHING_READY = "nothing_ready"
CLIENT_GONE = "client_gone"


@dataclass(slots=True)
class _Wait:
    """One read with its polls, until it is recorded."""

    key: Hashable
    id: str
    asked_s: float
    last_asked_s: float = 0.0
    num_polls: int = 0
    is_noted: bool = False
    ended_s: float = 0.0
    """When its last poll was answered without groups."""
    worst: str = ""


class ReplyTimes(NamedTuple):
    """Times of a reply's first and last byte (0: not sent), how long the last one waited for the disk, and the size."""

    first_s: float = 0.0
    sent_s: float = 0.0
    disk_s: float = 0.0
    num_bytes: int = 0


class ReadRecords:
    """The reads of one run."""

    def __init__(self, sink: TraceSink, weight_version: Callable[[], int | None]) -> None:
        self._sink = sink
        self._weight_version = weight_version
        self._in_vain: dict[Hashable, _Wait] = {}
        """Waits that another poll may continue, by what was asked for."""

    def begin(self, request: ReadRequest) -> "TracedRead":
        """Start the record of a request, which may continue an earlier wait."""
        now_s, key = monotonic(), _key(request)
        wait = self._in_vain.pop(key, None)
        if wait is not None and now_s - wait.ended_s > SAME_WAIT_S:
            self.write(wait)
            wait = None
        wait = wait or _Wait(key, new_span_id(), now_s)
        wait.last_asked_s = now_s
        wait.num_polls += 1
        return TracedRead(self, wait, request)

    def keep(self, wait: _Wait, worst: str) -> None:
        """Keep the wait of a poll answered without groups: another one may follow."""
        wait.ended_s, wait.worst = monotonic(), worst
        if earlier := self._in_vain.get(wait.key):  # two trainers asked for the same
            self.write(earlier)
        self._in_vain[wait.key] = wait

    def flush(self) -> None:
        """Record all unsatisfied waits, since no more polls will come."""
        waits, self._in_vain = self._in_vain, {}
        for wait in waits.values():
            self.write(wait)

    def note(self, wait: _Wait, step: int | None) -> None:
        """Record a wait that has lasted long and continues."""
        if not self._sink.rate:
            return
        wait.is_noted = True
        at = {"num_polls": wait.num_polls} | ({} if step is None else {"step": step})
        self._sink.write(Open(name="read", t=self._sink.at(wait.asked_s), id=wait.id, at=at))

    def write(self, wait: _Wait, batch: LeasedBatch | None = None, reply: "ReplyTimes | None" = None) -> None:
        """Record a finished read."""
        sink, t = self._sink, self._sink.at(wait.asked_s)
        first_s, sent_s, disk_s, num_bytes = reply or ReplyTimes()
        read = Read(t=t, id=wait.id, num_polls=wait.num_polls, weights=self._weight_version(), worst=wait.worst)
        if wait.num_polls > 1:
            read.last_asked = sink.at(wait.last_asked_s)
        if batch is not None:
            last = max(batch.groups, key=lambda group: group.ready_at_s, default=None)
            ready_s = last.ready_at_s if last is not None else 0.0
            read.satisfied = sink.at(max(ready_s, wait.asked_s))
            read.by = last.group_id if last is not None and ready_s > wait.asked_s else ""
            read.judged = sink.at(batch.chosen_at_s)
            read.batch, read.step, read.num_rows = batch.batch_id, batch.row.step, batch.row.num_rows
            read.groups, read.num_bytes = list(batch.row.group_ids), num_bytes
            read.disk = round(disk_s * 1e9)
            read.first_byte = sink.at(first_s) if first_s else 0
            read.sent = sink.at(sent_s) if sent_s else 0
        sink.write(read)
        if wait.is_noted:
            sink.write(Span(name="read", t=t, d=sink.at(sent_s or wait.ended_s or monotonic()) - t, id=wait.id))


class TracedRead:
    """One request of a read. Exactly one of ``in_vain``, ``failed`` and ``ended`` is called last."""

    def __init__(self, records: ReadRecords, wait: _Wait, request: ReadRequest) -> None:
        self._records = records
        self._wait = wait
        self._step = request.step
        self._batch: LeasedBatch | None = None
        self._first_s = self._disk_s = 0.0
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        left_s = NOTED_AFTER_S - (monotonic() - wait.asked_s)
        if not wait.is_noted:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._note)

    def _note(self) -> None:
        self._records.note(self._wait, self._step)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def in_vain(self, worst: str = NOTHING_READY) -> None:
        """Record that the request was answered without groups."""
        self._stop()
        self._records.keep(self._wait, worst)

    def found(self, batch: LeasedBatch) -> None:
        """Record that the request has its groups, and the reply is being built."""
        self._batch = batch

    def begins(self, num_bytes: int) -> None:
        """Record the start of the reply."""
        self._first_s, self._num_bytes = monotonic(), num_bytes

    async def stored(self, delivery: Delivery, batch: LeasedBatch) -> bool:
        """Whether ``delivery`` confirms the batch, which waits until its lease is on the disk."""
        begun_s = monotonic()
        try:
            return await delivery.confirm(batch)
        finally:
            self._disk_s = monotonic() - begun_s

    def failed(self, error: BaseException) -> None:
        """Record that the request ended without a complete reply."""
        if isinstance(error, RunEnded):  # a client that misses this error keeps polling
            self.in_vain(error.code)
            return
        self._wait.worst = error.code if isinstance(error, ForebayError) else CLIENT_GONE
        self.ended(is_sent=False)

    def ended(self, *, is_sent: bool) -> None:
        """Record the end of the reply: the last byte was sent, or the client left before."""
        self._stop()
        if not is_sent and not self._wait.worst:
            self._wait.worst = CLIENT_GONE
        self._wait.worst = "" if is_sent else self._wait.worst
        self._wait.ended_s = now_s = monotonic()
        reply = ReplyTimes(self._first_s, now_s if is_sent else 0.0, self._disk_s, self._num_bytes)
        self._records.write(self._wait, self._batch, reply)


def _key(request: ReadRequest) -> Hashable:
    return request.is_slime, request.num_groups, request.batch_size, request.step
