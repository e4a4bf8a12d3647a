"""The file that a process appends records to: segments of whole lines, each with a head, for its owner alone."""

import fcntl
import os
from pathlib import Path

import msgspec

from forebay.core.files import make_folder, opener
from forebay.telemetry.tracing.records import Head

MAX_LINE_BYTES = 1 << 20
"""A line is shorter, its end included."""
SEGMENT_BYTES = 8 << 20
FOREIGN_BYTES = 64 << 20
"""No segment of ours gets so long: a longer file in a trace is of a run's own code."""
_MIN_SEGMENT_BYTES = 64 << 10
_SEGMENTS_OF_BUDGET = 16


def segment_bytes(max_bytes: int) -> int:
    """How long a segment gets: shorter where the budget is small, so that the open ones are a small part of it."""
    return min(SEGMENT_BYTES, max(_MIN_SEGMENT_BYTES, max_bytes // _SEGMENTS_OF_BUDGET))


class TraceFile:
    """Segments ``{process}-{start}-{pid}.{n}.jsonl``. Made when something is written; all calls from one thread."""

    def __init__(self, folder: Path, head: Head, max_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._head = head
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0
        self._number = 0

    def append(self, lines: bytes) -> None:
        """Append whole lines. Raises ``OSError``; the file then ends with the last line that fitted."""
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
        """End the segment. In a forked process this lets go of the parent's, which stays as it is."""
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
            except FileExistsError:  # pids come again: in a container after each start
                continue
        self._size = 0
        mark_as_written(self._fd)


def mark_as_written(fd: int) -> bool:
    """Say, until ``fd`` is closed, that somebody writes this segment; False if somebody else does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also of a file system without such locks: there every segment counts as being written
        return False
    return True
