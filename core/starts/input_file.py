"""Opening the files that a start names: regular ones, within the folders to read from, without waiting for anybody.

Server and run processes both open them here: what was checked may have become another file by the time it is read.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from forebay.core.files import check_regular

MAX_LINE_BYTES = 64 << 20
"""The default of the setting ``max_input_line_bytes``."""
_ROOTS, _LINE_BYTES = "FOREBAY_INPUT_ROOTS", "FOREBAY_MAX_INPUT_LINE_BYTES"

_O_PATH: int = getattr(os, "O_PATH", 0)
_F_GETPATH: int = getattr(fcntl, "F_GETPATH", 50)


class NotAllowed(OSError):
    """The file lies outside the folders to read from; ``strerror`` says so."""


class LineTooLong(ValueError):
    """A line is more than may be held."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What may be read, and how much of it at once. A run process has the server's in its environment."""

    roots: Sequence[Path] = ()
    """Folders under which the file must lie, without links in their own paths; anywhere if there are none."""
    max_line_bytes: int = MAX_LINE_BYTES

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell a run process, in the form of the settings."""
        return {_ROOTS: ":".join(map(str, self.roots)), _LINE_BYTES: str(self.max_line_bytes)}

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Those that ``environment`` told."""
        roots = [Path(part).resolve() for part in environ.get(_ROOTS, "").split(":") if part]
        return cls(roots, int(environ.get(_LINE_BYTES, MAX_LINE_BYTES)))

    def allow(self, path: Path) -> bool:
        """Whether a file may lie at ``path``, in which no links are left."""
        return not self.roots or any(path.is_relative_to(root) for root in self.roots)

    def open(self, path: str | Path) -> BinaryIO:
        """Open a regular file to read its bytes. Raises ``OSError`` for anything else, ``NotAllowed`` outside.

        Both are asked of the file that was opened, whatever its name leads to meanwhile.
        """
        descriptor = self._open(path)
        try:
            check_regular(descriptor)
            if self.roots and not self.allow(_place(descriptor)):
                raise NotAllowed(0, "it is outside the allowed folders")
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _open(self, path: str | Path) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        if not _O_PATH:
            return os.open(path, flags)
        # Looked at before it is opened for reading, which may do something to a device, or to who waits at a pipe.
        handle = os.open(path, _O_PATH | os.O_CLOEXEC)
        try:
            check_regular(handle)
            return os.open(f"/proc/self/fd/{handle}", flags)
        finally:
            os.close(handle)

    def lines(self, file: BinaryIO) -> Iterator[bytes]:
        """The lines of a file, each with its end. Raises ``LineTooLong`` for one that is too long to be held."""
        while line := file.readline(self.max_line_bytes + 1):
            if len(line) > self.max_line_bytes:
                raise LineTooLong(f"longer than {self.max_line_bytes} bytes (max_input_line_bytes of the server)")
            yield line


def _place(descriptor: int) -> Path:
    """Where an open file lies, without links."""
    if _O_PATH:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    return Path(fcntl.fcntl(descriptor, _F_GETPATH, bytes(1024)).rstrip(b"\0").decode())
