"""The log file of a run: what its process and their children print, limited in size."""

from contextlib import suppress
from pathlib import Path

LOG_LIMIT_BYTES = 32 * 2**20
"""How much of a run's output is kept: the newest, in two files of at most half of this each."""
_TAIL_BYTES = 2**20


def log_path(run_dir: Path) -> Path:
    """The newer file; the older one has the suffix ``.1`` added."""
    return run_dir / "run.log"


class RunLog:
    """Appends to a log file; when it has half of ``limit_bytes``, it takes the place of the older file."""

    def __init__(self, path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
        self._path = path
        self._half_bytes = limit_bytes // 2
        self._file = path.open("ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``, as far as the disk takes it."""
        # What the disk refuses is lost: a full disk must not stop the run at its next print.
        with suppress(OSError):
            if self._file.tell() + len(chunk) > self._half_bytes:
                self._rotate()
            self._file.write(chunk[-self._half_bytes :])

    def _rotate(self) -> None:
        self._path.replace(older_file(self._path))
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


def older_file(path: Path) -> Path:
    """The file that holds what came before ``path``."""
    return path.with_name(path.name + ".1")


def read_tail(path: Path, num_lines: int) -> list[str]:
    """The last ``num_lines`` lines of the log at ``path``, oldest first; of long logs, lines of the last MiB."""
    if num_lines <= 0:
        return []
    text = _end_of(path, _TAIL_BYTES)
    if text.count(b"\n") < num_lines and len(text) < _TAIL_BYTES:
        text = _end_of(older_file(path), _TAIL_BYTES - len(text)) + text
    return text.decode("utf-8", errors="replace").splitlines()[-num_lines:]


def _end_of(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read(num_bytes)
    except FileNotFoundError:
        return b""
