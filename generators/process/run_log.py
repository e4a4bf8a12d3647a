"""The log file of a run: what its process and their children print. ``OutputFile`` limits its size."""

from pathlib import Path

from forebay.core.files import regular_opener
from forebay.telemetry.output_file import older_file

_TAIL_BYTES = 2**20


def log_path(run_dir: Path) -> Path:
    """The newer file; the older one has the suffix ``.1`` added."""
    return run_dir / "run.log"


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
        with open(path, "rb", opener=regular_opener) as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read(num_bytes)
    except FileNotFoundError:
        return b""
    except OSError as error:  # the run's own code can put anything there
        return f"{path.name} cannot be read: {error.strerror}\n".encode()
