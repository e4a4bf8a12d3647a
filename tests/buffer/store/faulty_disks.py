"""Disks that fail on purpose, for tests: one that forgets at a power cut, one that refuses."""

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

from forebay.core.records.disk_files import AppendFile, BytesLike, DiskAppendFile, DiskFiles, ReadFile


class PowerLostError(OSError):
    """What every operation says from the moment of the cut on."""


class LossyFiles(DiskFiles):
    """A disk on which everything is lost at a power cut that was not synced: bytes, names, truncations and removals.

    Each changing operation counts; the one after ``cut_after`` of them stops half-way, and all later ones fail. Then
    ``forget`` makes ``directory`` what a disk would show after the cut: with ``rng``, some unsynced bytes survive at
    the end of a file, as a real disk may have written them.
    """

    def __init__(self, directory: Path, *, cut_after: int | None = None) -> None:
        self.num_operations = 0
        self._directory = directory
        self._cut_after = cut_after
        self._synced = {path: path.read_bytes() for path in self._paths()}
        self._names = set(self._synced)

    @property
    def has_power(self) -> bool:
        """Whether the cut is still to come."""
        return self._cut_after is None or self.num_operations <= self._cut_after

    def step(self) -> bool:
        """Count an operation; False if it is the one that stops half-way. Raises ``PowerLostError`` behind it."""
        had_power = self.has_power
        self.num_operations += 1
        if not had_power:
            raise PowerLostError(errno.EIO, "the power is off")
        return self.has_power

    def step_whole(self) -> None:
        """Count an operation that is done wholly or not at all."""
        if not self.step():
            raise PowerLostError(errno.EIO, "the power went off")

    def open_append(self, path: Path) -> AppendFile:
        if not path.exists():
            self.step_whole()
        return LossyAppendFile(path, self)

    def remove(self, path: Path) -> None:
        self.step_whole()
        super().remove(path)

    def sync_directory(self, directory: Path) -> None:
        self.step_whole()
        if directory == self._directory:
            self._names = set(self._paths())

    def note_synced(self, path: Path) -> None:
        """Remember what ``path`` holds now as lasting."""
        self._synced[path] = path.read_bytes()

    def forget(self, rng: random.Random | None = None) -> None:
        """Leave in the directory what was synced."""
        for path in self._paths():
            if path not in self._names:
                path.unlink()
        for path in self._names:
            synced = self._synced.get(path, b"")
            written = path.read_bytes() if path.exists() else b""
            kept = rng.randint(len(synced), len(written)) if rng and written.startswith(synced) else len(synced)
            path.write_bytes(synced + written[len(synced) : kept])

    def _paths(self) -> list[Path]:
        return [path for path in self._directory.glob("*") if path.is_file()]


class LossyAppendFile(DiskAppendFile):
    """A file of ``LossyFiles``."""

    def __init__(self, path: Path, files: LossyFiles) -> None:
        super().__init__(path)
        self._path = path
        self._files = files

    def write(self, buffers: Sequence[BytesLike]) -> None:
        if self._files.step():
            super().write(buffers)
            return
        data = b"".join(buffers)
        super().write([data[: len(data) // 2]])
        raise PowerLostError(errno.EIO, "the power went off")

    def sync(self) -> None:
        self._files.step_whole()
        self._files.note_synced(self._path)

    def truncate(self, length: int) -> None:
        self._files.step_whole()
        super().truncate(length)


class RefusingFiles(DiskFiles):
    """A disk with ``free_bytes`` left (None: enough), whose syncs fail while ``refuses_sync``."""

    read_error = 0
    """With this ``errno``, unless it is 0, opening a file for reading fails."""

    def __init__(self) -> None:
        self.free_bytes: int | None = None
        self.refuses_sync = False

    def open_read(self, path: Path) -> ReadFile:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().open_read(path)

    def open_append(self, path: Path) -> AppendFile:
        if self.free_bytes == 0 and not path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return RefusingAppendFile(path, self)


class SmallDisk(DiskFiles):
    """A disk of ``size`` bytes (None: enough), of which the files below ``directory`` take what they are long."""

    def __init__(self, directory: Path) -> None:
        self.size: int | None = None
        self._directory = directory

    def open_append(self, path: Path) -> AppendFile:
        return SmallDiskFile(path, self)

    def allocate(self, path: Path, num_bytes: int) -> None:
        if num_bytes > self.free_bytes(path.parent):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(path, num_bytes)

    def free_bytes(self, directory: Path) -> int:
        size = self.size  # once: a test changes it beside the writer's thread
        if size is None:
            return super().free_bytes(directory)
        # The index is not written by way of this disk.
        files = [*self._directory.glob("segments/*"), *self._directory.glob("reserve")]
        return max(0, size - sum(path.stat().st_size for path in files))


class SmallDiskFile(DiskAppendFile):
    """A file of ``SmallDisk``."""

    def __init__(self, path: Path, disk: SmallDisk) -> None:
        super().__init__(path)
        self._disk = disk
        self._folder = path.parent

    def write(self, buffers: Sequence[BytesLike]) -> None:
        data = b"".join(buffers)
        free = self._disk.free_bytes(self._folder)
        super().write([data[:free]])
        if len(data) > free:
            raise OSError(errno.ENOSPC, "No space left on device")


class RefusingAppendFile(DiskAppendFile):
    """A file of ``RefusingFiles``: it takes what fits, and then refuses."""

    def __init__(self, path: Path, files: RefusingFiles) -> None:
        super().__init__(path)
        self._files = files

    def write(self, buffers: Sequence[BytesLike]) -> None:
        free = self._files.free_bytes
        if free is None:
            super().write(buffers)
            return
        data = b"".join(buffers)
        super().write([data[:free]])
        self._files.free_bytes = max(0, free - len(data))
        if len(data) > free:
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self) -> None:
        if self._files.refuses_sync:
            raise OSError(errno.EIO, "Input/output error")
        super().sync()
