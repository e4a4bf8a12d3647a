"""The log's file operations, so that a test can substitute a faulty disk."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from forebay.core.files import FILE_MODE, sync_directory

BytesLike = bytes | memoryview

MAX_BUFFERS = 1024
"""Maximum number of buffers in one ``writev`` on Linux (IOV_MAX)."""


class AppendFile(Protocol):
    """A file that grows at its end."""

    def size(self) -> int:
        """Length in bytes."""
        ...

    def write(self, buffers: Sequence[BytesLike]) -> None:
        """Append all of ``buffers``. After an ``OSError`` the file may have any part of them."""
        ...

    def sync(self) -> None:
        """Return when everything written is on disk."""
        ...

    def truncate(self, length: int) -> None:
        """Cut off everything after ``length`` bytes."""
        ...

    def close(self) -> None:
        """Close the descriptor."""
        ...


class ReadFile(Protocol):
    """A file that is read at any offset."""

    def size(self) -> int:
        """Length in bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes at ``offset``; fewer only at the end of the file."""
        ...

    def fill(self, buffers: Sequence[memoryview], offset: int, *, may_wait: bool) -> bool:
        """Fill ``buffers``, one after another, with the data from ``offset``.

        False if the file ends first or, without ``may_wait``, if the disk would be needed.
        """
        ...

    def send_to(self, socket_fd: int, offset: int, length: int) -> int:
        """Send up to ``length`` bytes from ``offset`` to a socket; the number sent, 0 at the end of the file."""
        ...

    def close(self) -> None:
        """Close the descriptor."""
        ...


class Files(Protocol):
    """A disk. All methods raise ``OSError``."""

    def list(self, directory: Path) -> list[str]:
        """List the names in ``directory``."""
        ...

    def open_append(self, path: Path) -> AppendFile:
        """Open ``path`` for appending, creating it if needed. Its name is durable only after ``sync_directory``."""
        ...

    def open_read(self, path: Path) -> ReadFile:
        """Open ``path`` for reading."""
        ...

    def remove(self, path: Path) -> None:
        """Delete ``path``; durable only after ``sync_directory``."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Return when the names in ``directory`` are on disk."""
        ...

    def allocate(self, path: Path, num_bytes: int) -> None:
        """Create ``path`` if needed, and allocate ``num_bytes`` of the disk to it."""
        ...

    def free_bytes(self, directory: Path) -> int:
        """Free bytes on the disk of ``directory``."""
        ...


class DiskAppendFile:
    """An ``AppendFile`` of the operating system."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, buffers: Sequence[BytesLike]) -> None:
        for start in range(0, len(buffers), MAX_BUFFERS):
            self._write_all(buffers[start : start + MAX_BUFFERS])

    def _write_all(self, buffers: Sequence[BytesLike]) -> None:
        # One call writes everything, unless the disk fills up or the buffers exceed 2 GiB.
        remaining = list(buffers)
        while remaining:
            remaining = behind(remaining, os.writev(self._fd, remaining))

    def sync(self) -> None:
        # Not `fsync`: the file's times need not be durable, and would cost another disk write.
        os.fdatasync(self._fd)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def close(self) -> None:
        os.close(self._fd)


def behind(buffers: list[BytesLike], num_bytes: int) -> list[BytesLike]:
    """Return what follows the first ``num_bytes`` bytes of ``buffers``."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [memoryview(buffer)[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []


class DiskReadFile:
    """A ``ReadFile`` of the operating system."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        found = os.pread(self._fd, length, offset)
        # A signal, or a length above 2 GiB, may shorten one call.
        while len(found) < length and (more := os.pread(self._fd, length - len(found), offset + len(found))):
            found += more
        return found

    def fill(self, buffers: Sequence[memoryview], offset: int, *, may_wait: bool) -> bool:
        if not may_wait:
            return self._read_cached(buffers, offset) == sum(map(len, buffers))
        left: list[BytesLike] = [buffer for buffer in buffers if buffer]
        while left:
            num_bytes = os.preadv(self._fd, left[:MAX_BUFFERS], offset)
            if num_bytes == 0:
                return False
            left, offset = behind(left, num_bytes), offset + num_bytes
        return True

    def send_to(self, socket_fd: int, offset: int, length: int) -> int:
        return os.sendfile(socket_fd, self._fd, offset, length)

    def _read_cached(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Return the number of bytes read."""
        try:
            return os.preadv(self._fd, buffers, offset, os.RWF_NOWAIT)
        except OSError:
            # Not in the page cache, or the file system does not support this: the caller reads in a thread.
            return -1

    def close(self) -> None:
        os.close(self._fd)


class DiskFiles:
    """``Files`` of the operating system."""

    def list(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def open_append(self, path: Path) -> AppendFile:
        return DiskAppendFile(path)

    def open_read(self, path: Path) -> ReadFile:
        return DiskReadFile(path)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, directory: Path) -> None:
        sync_directory(directory)

    def allocate(self, path: Path, num_bytes: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
