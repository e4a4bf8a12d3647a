"""Disk space reserved for a full disk, because acknowledgements, leases and releases are log writes too.

The space is a file that is released in parts. It is never read.
"""

import errno
import logging
from contextlib import suppress
from pathlib import Path

from forebay.buffer.store.index_damage import is_no_room as is_no_room_for_index
from forebay.core.records.disk_files import Files

PART_BYTES = 1 << 20
"""Bytes released per step: other programs write to the same disk and take what is free."""
SPARE_BYTES = 4 << 20
"""Additional free bytes required before the reserve is refilled; otherwise the next write would need it again."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


def is_no_room(error: BaseException) -> bool:
    """Whether ``error`` means that the disk is full."""
    return (isinstance(error, OSError) and error.errno in _NO_ROOM) or is_no_room_for_index(error)


class Reserve:
    """``num_bytes`` reserved in the file ``path``; 0 reserves none. Used from one thread."""

    def __init__(self, path: Path, num_bytes: int, files: Files) -> None:
        self._path = path
        self._wanted = num_bytes
        self._files = files
        self._kept = 0

    def open(self) -> None:
        """Adopt the existing file, and fill it if there is room."""
        if not self._wanted:
            self._path.unlink(missing_ok=True)
            return
        self._resize(min(self._size(), self._wanted))
        if not self.fill(0):
            logger.warning("the reserve is incomplete for lack of room: %d of %d bytes", self._kept, self._wanted)

    def fill(self, num_free: int) -> bool:
        """Fill the reserve if ``num_free`` bytes stay free; return whether it is full."""
        try:
            missing = self._wanted - self._kept
            if self._files.free_bytes(self._path.parent) < missing + num_free:
                return False
            if missing:
                self._files.allocate(self._path, self._wanted)
                self._kept = self._wanted
        except OSError as error:
            self._fail(error)
            return False
        return True

    def give(self) -> bool:
        """Release part of the reserve; False if nothing is left."""
        if not self._kept:
            return False
        try:
            self._resize(max(0, self._kept - PART_BYTES))
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM:  # these mean that another program was faster, or there is a quota
            logger.warning("the reserve cannot be changed: %s", error)
        with suppress(OSError):  # releases what was added before the error
            self._resize(self._kept)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _resize(self, num_bytes: int) -> None:
        if self._size() != num_bytes:
            file = self._files.open_append(self._path)
            try:
                file.truncate(num_bytes)
            finally:
                file.close()
        self._kept = num_bytes
