"""The logs of a run: what its process and their children print, and what its agents that are commands printed.

The first is one file, ``run.log``, which ``OutputFile`` limits. The others are a file for each rollout, written by the
run process (``AgentLogs``), and read by the server (``read_agent_log``): each is bounded by what the sandbox keeps of
the output, all of them together by ``TOTAL_BYTES``, beyond which the oldest go.
"""

import logging
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from forebay.core.files import FOLDER_MODE, opener, regular_opener
from forebay.telemetry.output_file import older_file

logger = logging.getLogger(__name__)

RUN_DIR_VARIABLE = "FOREBAY_RUN_DIR"
"""Tells a run process where its files are. A generator that somebody runs by hand has none, and keeps nothing."""
TOTAL_BYTES = 64 * 2**20
_TAIL_BYTES = 2**20
_FOLDER = "agents"
_UID = re.compile(r"[\w-]+")
_FORK = re.compile(r"-f\d+-[^-]+$")
"""What the ``uid`` of a fork has behind that of its rollout's main sample."""


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


class AgentLogs:
    """Keeps the newest of them, in the folder ``agents`` of a run's folder; nothing without such a folder."""

    def __init__(self, run_dir: Path | None, total_bytes: int = TOTAL_BYTES) -> None:
        self._folder = run_dir and run_dir / _FOLDER
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        # Those of an earlier process of this start count as well.
        self._kept = dict(_files_in(self._folder) if self._folder else [])
        """The size of each, the oldest first."""
        self._num_bytes = sum(self._kept.values())

    @classmethod
    def of_this_run(cls) -> "AgentLogs":
        """Those of the run that this process is."""
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        return cls(Path(run_dir) if run_dir else None)

    def keep(self, uid: str, printed: str) -> None:
        """Keep what the agent of rollout ``uid`` printed, in place of what an earlier attempt did. For any thread."""
        if self._folder is None:
            return
        path, content = self._folder / f"{uid}.log", printed.encode()
        try:
            self._folder.mkdir(FOLDER_MODE, exist_ok=True)
            with open(path, "wb", opener=opener) as file:
                file.write(content)
        except OSError as error:  # a full disk must not cost the rollout
            logger.warning("what the agent of %s printed could not be kept: %s", uid, error)
            return
        with self._lock:
            self._num_bytes += len(content) - self._kept.pop(path, 0)
            self._kept[path] = len(content)
            while self._num_bytes > self._total_bytes:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        path = next(iter(self._kept))
        self._num_bytes -= self._kept.pop(path)
        path.unlink(missing_ok=True)


def _files_in(folder: Path) -> list[tuple[Path, int]]:
    """Each with its size, the oldest first."""
    found = [(path, path.stat()) for path in folder.glob("*.log")]
    return [(path, stat.st_size) for path, stat in sorted(found, key=lambda each: each[1].st_mtime_ns)]


def read_agent_log(run_dirs: Iterable[Path], uid: str) -> str | None:
    """What the agent of sample ``uid`` printed; None if nothing is kept. The first folder that has it counts."""
    if not _UID.fullmatch(uid):  # it comes from outside: no path
        return None
    for run_dir in run_dirs:
        for name in (uid, _FORK.sub("", uid)):
            try:
                with open(run_dir / _FOLDER / f"{name}.log", "rb", opener=regular_opener) as file:
                    return file.read(TOTAL_BYTES).decode(errors="replace")
            except OSError:  # there is none, or the run's own code has put something else there
                continue
    return None
