"""From records that wait in memory to segments of whole lines, which only the process's user can read."""

import fcntl
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from forebay.core.files import make_folder, opener
from forebay.telemetry.tracing.records import Dropped, Head, Open, Record, Span

CAPACITY = 65_536
_SPANS_AT_ONCE = 1_024
_OTHERS_AT_ONCE = 64
"""Fewer, since a summary may have a thousand turns."""
MAX_LINE_BYTES = 1 << 20
"""Every line is shorter than this, including its end."""
SEGMENT_BYTES = 8 << 20
FOREIGN_BYTES = 64 << 20
"""Longer than any segment: a larger file in a trace folder was written by user code."""
_MIN_SEGMENT_BYTES = 64 << 10
_SEGMENTS_OF_BUDGET = 16


def segment_bytes(max_bytes: int) -> int:
    """The size of a segment. It is smaller for a small budget, so that open segments are a small part of it."""
    return min(SEGMENT_BYTES, max(_MIN_SEGMENT_BYTES, max_bytes // _SEGMENTS_OF_BUDGET))


class RecordQueue:
    """A bounded queue of records. When it is full, spans are dropped first.

    Takes records from any thread without a lock; only one thread may take them out.
    """

    def __init__(self, on_many: Callable[[], object], capacity: int = CAPACITY) -> None:
        self._on_many = on_many
        self._capacity, self._many = capacity, capacity // 4
        self._encoder = msgspec.json.Encoder()
        self._spans: deque[Record] = deque()
        self._others: deque[Record] = deque()
        self._lost = Dropped(t=0, why="queue")

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
        elif is_span or not _take(self._spans, 1):
            self._count_lost(record)
        else:
            self._lost.spans += 1
            self._others.append(record)

    def take_lines(self, now: int) -> bytes:
        """The next records as whole lines; empty if there are none."""
        records = _take(self._spans, _SPANS_AT_ONCE) or _take(self._others, _OTHERS_AT_ONCE)
        if self._lost.spans or self._lost.summaries:
            lost, self._lost = self._lost, Dropped(t=0, why="queue")
            lost.t = now
            records.append(lost)
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
        self._count_lost(record)
        return b""

    def _count_lost(self, record: Record) -> None:
        if isinstance(record, Span | Open):
            self._lost.spans += 1
        else:
            self._lost.summaries += 1


def _take(queue: deque[Record], number: int) -> list[Record]:
    records: list[Record] = []
    with suppress(IndexError):  # empty, or ``put`` has removed the last one meanwhile
        while len(records) < number:
            records.append(queue.popleft())
    return records


class TraceFile:
    """Segments ``{process}-{start}-{pid}.{n}.jsonl``, each with a head. Created on the first write.

    All calls must be from one thread.
    """

    def __init__(self, folder: Path, head: Head, max_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._head = head
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0
        self._number = 0

    def append(self, lines: bytes) -> None:
        """Append whole lines. Raises ``OSError``; the file then ends with the last write that succeeded."""
        if self._fd >= 0 and self._size + len(lines) > self._max_bytes:
            self.close()
        if self._fd < 0:
            self._open()
            head = msgspec.structs.replace(self._head, number=self._number)
            lines = msgspec.json.encode(head) + b"\n" + lines
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(lines)

    def close(self) -> None:
        """Close the segment. In a forked process this releases the parent's segment without changing it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        make_folder(self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while self._fd < 0:
            self._number += 1
            head = self._head
            path = self._folder / f"{head.process}-{head.start}-{head.pid}.{self._number}.jsonl"
            try:
                self._fd = opener(str(path), flags)
            except FileExistsError:  # pids repeat, for example in a container after each start
                continue
        self._size = 0
        mark_as_written(self._fd)


def mark_as_written(fd: int) -> bool:
    """Lock the segment as being written until ``fd`` is closed. Returns False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also if the file system has no such locks: then every segment counts as being written
        return False
    return True
