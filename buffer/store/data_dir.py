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
"""What the names begin with that the server makes in its data directory."""

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
        """Make what is missing and lock it. Raises ``StorageFailed`` when it is in use or of another format."""
        self.path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        self.segments.mkdir(FOLDER_MODE, exist_ok=True)
        self._lock()
        try:
            # Under the lock: two servers that start at once must not both write it.
            self._check_format()
            self._make_private()
            sync_directory(self.path)
        except BaseException:  # a directory that cannot be used must not stay locked
            self.close()
            raise

    def close(self) -> None:
        """Let another process have it."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self) -> None:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            # The kernel lets go of it with the process, however that ends: no stale lock is ever left.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise self._refusal(
                "another process is using it", "stop the other server, or give this one another --data-dir"
            ) from error
        self._lock_fd = fd

    def _make_private(self) -> None:
        """What lies in it is nobody else's: conversations, rewards, generators, keys of runs and engines."""
        # By name: whoever names a folder of other things must not find the rights of all of them changed.
        found = [entry for entry in self.path.iterdir() if entry.name.startswith(OWN_NAMES)]
        try:
            num_changed = sum(map(make_private, found))
            if self.path.stat().st_mode & OTHERS:
                self.path.chmod(FOLDER_MODE)
                num_changed += 1
        except OSError as error:
            logger.warning("others may read what is in %s, and it cannot be changed: %s", self.path, error)
            return
        if num_changed:
            logger.warning(
                "others could read what is in %s: %d files and folders are its owner's now", self.path, num_changed
            )

    def _check_format(self) -> None:
        path = self.path / "format"
        if not path.exists():
            write_durably(path, f"{_FORMAT_PREFIX}{FORMAT_VERSION}\n".encode())
            return
        found = path.read_text(errors="replace").strip()
        version = found.removeprefix(_FORMAT_PREFIX)
        if not found.startswith(_FORMAT_PREFIX) or not version.isdecimal():
            raise self._refusal(f"its file 'format' says {found[:40]!r}", "is it a data directory of forebay?")
        if int(version) != FORMAT_VERSION:
            raise self._refusal(
                f"it has format {version}, and this forebay reads format {FORMAT_VERSION}",
                "use the version of forebay that wrote it, or give another --data-dir",
            )

    def _refusal(self, reason: str, hint: str) -> StorageFailed:
        return StorageFailed(reason, what=f"the data directory {self.path} cannot be used", hint=hint)
