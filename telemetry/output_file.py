"""Keeps the output of a process in a file of limited size. Has few imports, so that it loads fast."""

from contextlib import suppress
from io import FileIO
from pathlib import Path

from forebay.core.files import regular_opener


class OutputFile:
    """Appends to a file. At half of ``limit_bytes``, the file replaces the older one and a new one is started."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._half_bytes = limit_bytes // 2
        self._file = _opened(path)

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``, as far as the disk accepts it."""
        # Write errors are ignored: a full disk must not stop the run at its next print.
        with suppress(OSError):
            if self._file.tell() + len(chunk) > self._half_bytes:
                self._rotate()
            self._file.write(chunk[-self._half_bytes :])

    def _rotate(self) -> None:
        self._path.replace(older_file(self._path))
        self._file.close()
        self._file = _opened(self._path)

    def close(self) -> None:
        self._file.close()


def _opened(path: Path) -> FileIO:
    return FileIO(path, "a", opener=regular_opener)


def older_file(path: Path) -> Path:
    """The file with the output before that of ``path``."""
    return path.with_name(path.name + ".1")
