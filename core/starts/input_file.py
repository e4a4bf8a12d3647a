"""Opens the files that a start names: only regular files within the allowed folders, without blocking.

Both the server and run processes use this, because a checked file may be replaced before it is read.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from forebay.core.files import check_regular

MAX_LINE_BYTES = 64 << 20
"""Default of the setting ``max_input_line_bytes``."""
_ROOTS, _LINE_BYTES = "FOREBAY_INPUT_ROOTS", "FOREBAY_MAX_INPUT_LINE_BYTES"

_O_PATH: int = getattr(os, "O_PATH", 0)
_F_GETPATH: int = getattr(fcntl, "F_GETPATH", 50)


class NotAllowed(OSError):
    """The file is outside the allowed folders; ``strerror`` says so."""


class LineTooLong(ValueError):
    """A line exceeds the limit."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Which files may be read, and the line limit. A run process gets the server's through its environment."""

    roots: Sequence[Path] = ()
    """Folders that must contain the file, with links in their own paths resolved; if empty, any path is allowed."""
    max_line_bytes: int = MAX_LINE_BYTES

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the limits to a run process, in the form of the settings."""
        return {_ROOTS: ":".join(map(str, self.roots)), _LINE_BYTES: str(self.max_line_bytes)}

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Read the limits that ``environment`` has set."""
        roots = [Path(part).resolve() for part in environ.get(_ROOTS, "").split(":") if part]
        if roots and (own := environ.get("FOREBAY_RUN_DIR")):  # a run may read what it has written itself
            roots.append(Path(own).resolve())
        return cls(roots, int(environ.get(_LINE_BYTES, MAX_LINE_BYTES)))

    def allow(self, path: Path) -> bool:
        """Whether a file may be at ``path``, whose links are resolved."""
        return not self.roots or any(path.is_relative_to(root) for root in self.roots)

    def open(self, path: str | Path) -> BinaryIO:
        """Open a regular file for reading bytes. Raises ``OSError`` for anything else, ``NotAllowed`` outside.

        Both checks apply to the opened file, even if its name refers to another file meanwhile.
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
        # Checked before it is opened for reading, which may affect a device, or a process that waits at a pipe.
        handle = os.open(path, _O_PATH | os.O_CLOEXEC)
        try:
            check_regular(handle)
            return os.open(f"/proc/self/fd/{handle}", flags)
        finally:
            os.close(handle)

    def lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the lines of a file, including line ends. Raises ``LineTooLong`` for a line over the limit."""
        while line := file.readline(self.max_line_bytes + 1):
            if len(line) > self.max_line_bytes:
                raise LineTooLong(f"longer than {self.max_line_bytes} bytes (the server's max_input_line_bytes)")
            yield line


def _place(descriptor: int) -> Path:
    """Path of an open file, without links."""
    if _O_PATH:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    return Path(fcntl.fcntl(descriptor, _F_GETPATH, bytes(1024)).rstrip(b"\0").decode())
