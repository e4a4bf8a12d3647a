"""A bounded queue of records for the file, for any number of threads. When it is full, spans are dropped first."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from forebay.telemetry.tracing.records import Dropped, Open, Record, Span
from forebay.telemetry.tracing.trace_file import MAX_LINE_BYTES

CAPACITY = 65_536
_SPANS_AT_ONCE = 1_024
_OTHERS_AT_ONCE = 64
"""Fewer, since a summary may have a thousand turns."""


class RecordQueue:
    """Takes records from any thread without a lock; only one thread may take them out."""

    def __init__(self, on_many: Callable[[], object], capacity: int = CAPACITY) -> None:
        self._on_many = on_many
        self._many = capacity // 4
        self._capacity = capacity
        self._encoder = msgspec.json.Encoder()
        self._spans: deque[Record] = deque()
        self._others: deque[Record] = deque()
        self._num_lost_spans = 0
        self._num_lost_others = 0

    def __len__(self) -> int:
        return len(self._spans) + len(self._others)

    def put(self, record: Record) -> None:
        """Add a record. If the queue is full, a new span is dropped; any other record replaces the oldest span."""
        kind = type(record)
        is_span = kind is Span or kind is Open
        size = len(self._spans) + len(self._others)
        if size < self._capacity:
            (self._spans if is_span else self._others).append(record)
            if size == self._many:
                self._on_many()
        elif is_span:
            self._num_lost_spans += 1
        else:
            self._replace(record)

    def clear(self) -> None:
        """Drop all records."""
        self._spans.clear()
        self._others.clear()
        self._num_lost_spans = self._num_lost_others = 0

    def take_lines(self, now: int) -> bytes:
        """The next records as whole lines; empty if there are none."""
        records = _take(self._spans, _SPANS_AT_ONCE) or _take(self._others, _OTHERS_AT_ONCE)
        if self._num_lost_spans or self._num_lost_others:
            records.append(self._lost(now))
        return self._encode(records) if records else b""

    def _replace(self, record: Record) -> None:
        try:
            self._spans.popleft()
        except IndexError:
            self._num_lost_others += 1
        else:
            self._num_lost_spans += 1
            self._others.append(record)

    def _lost(self, now: int) -> Dropped:
        spans, self._num_lost_spans = self._num_lost_spans, 0
        others, self._num_lost_others = self._num_lost_others, 0
        return Dropped(t=now, spans=spans, summaries=others, why="queue")

    def _encode(self, records: list[Record]) -> bytes:
        with suppress(Exception):  # if one record cannot be encoded, only that one is lost
            lines = self._encoder.encode_lines(records)
            if len(lines) < MAX_LINE_BYTES:
                return lines
        return b"".join(map(self._line, records))

    def _line(self, record: Record) -> bytes:
        with suppress(Exception):
            line = self._encoder.encode(record) + b"\n"
            if len(line) < MAX_LINE_BYTES:
                return line
        if type(record) is Span or type(record) is Open:
            self._num_lost_spans += 1
        else:
            self._num_lost_others += 1
        return b""


def _take(queue: deque[Record], number: int) -> list[Record]:
    records: list[Record] = []
    with suppress(IndexError):  # empty, or ``put`` has removed the last one meanwhile
        while len(records) < number:
            records.append(queue.popleft())
    return records
