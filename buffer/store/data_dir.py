"""A data directory: its layout, its format, and the lock that keeps a second server out."""

import fcntl
import logging
import os
from pathlib import Path

from forebay.core.errors import StorageFailed
from forebay.core.files import FILE_MODE, FOLDER_MODE, OTHERS, make_private, sync_directory, write_durably

FORMAT_VERSION = 3
_FORMAT_PREFIX = "forebay data "
OWN_NAMES = ("format", "lock", "reserve", "index.sqlite", "segments", "quarantine", "runs", "pauses")
"""Prefixes of the names that the server creates in its data directory."""

logger = logging.getLogger(__name__)


class DataDir:
    """``format``, ``lock``, ``reserve``, ``index.sqlite``, ``segments/`` and ``quarantine/`` under ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments = path / "segments"
        self.quarantine = path / "quarantine"
        self.index = path / "index.sqlite"
        self.reserve = path / "reserve"
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Create what is missing and lock it. Raises ``StorageFailed`` if it is in use or has another format."""
        self.path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        self.segments.mkdir(FOLDER_MODE, exist_ok=True)
        self._lock()
        try:
            # Under the lock, so that two servers starting at once do not both write it.
            self._check_format()
            self._make_private()
            sync_directory(self.path)
        except BaseException:  # a directory that cannot be used must not stay locked
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self) -> None:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            # The kernel releases the lock when the process ends for any reason, so no stale lock remains.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise self._refusal(
                "another process is using it", "stop the other server, or give this one another --data-dir"
            ) from error
        self._lock_fd = fd

    def _make_private(self) -> None:
        """Remove other users' permissions: it holds conversations, rewards, generators, keys of runs and engines."""
        # By name: if the folder has other contents, their permissions must not change.
        found = [entry for entry in self.path.iterdir() if entry.name.startswith(OWN_NAMES)]
        try:
            num_changed = sum(map(make_private, found))
            if self.path.stat().st_mode & OTHERS:
                self.path.chmod(FOLDER_MODE)
                num_changed += 1
        except OSError as error:
            logger.warning("other users may read files in %s; changing the permissions failed: %s", self.path, error)
            return
        if num_changed:
            logger.warning(
                "other users could read files in %s: %d files and folders are now private", self.path, num_changed
            )

    def _check_format(self) -> None:
        path = self.path / "format"
        if not path.exists():
            write_durably(path, f"{_FORMAT_PREFIX}{FORMAT_VERSION}\n".encode())
            return
        found = path.read_text(errors="replace").strip()
        version = found.removeprefix(_FORMAT_PREFIX)
        if not found.startswith(_FORMAT_PREFIX) or not version.isdecimal():
            raise self._refusal(f"its file 'format' says {found[:40]!r}", "is this a data directory of Forebay?")
        if int(version) != FORMAT_VERSION:
            raise self._refusal(
                f"it has format {version}, but this version of Forebay reads format {FORMAT_VERSION}",
                "use the version of Forebay that wrote it, or another --data-dir",
            )

    def _refusal(self, reason: str, hint: str) -> StorageFailed:
        return StorageFailed(reason, what=f"the data directory {self.path} cannot be used", hint=hint)
