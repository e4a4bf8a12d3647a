"""Appends a process's records to segments of whole lines, each with a head. Only the process's user can read them."""

import fcntl
import os
from pathlib import Path

import msgspec

from forebay.core.files import make_folder, opener
from forebay.telemetry.tracing.records import Head

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


class TraceFile:
    """Segments ``{process}-{start}-{pid}.{n}.jsonl``, created on the first write. All calls must be from one thread."""

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
