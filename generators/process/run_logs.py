"""Logs of a run: the output of its process and children, and the output of agents that are commands.

The first is one file, ``run.log``, whose size ``OutputFile`` limits. The others are one file per rollout, written by
the run process (``AgentLogs``) and read by the server (``read_agent_log``). The sandbox limits each file, and
``TOTAL_BYTES`` limits all of them together: the oldest are deleted.
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
"""Environment variable with the folder of the run. Generators started by hand have none, and keep no logs."""
TOTAL_BYTES = 64 * 2**20
_TAIL_BYTES = 2**20
_FOLDER = "agents"
_UID = re.compile(r"[\w-]+")
_FORK = re.compile(r"-f\d+-[^-]+$")
"""Suffix that a fork's ``uid`` adds to the ``uid`` of the rollout's main sample."""


def log_path(run_dir: Path) -> Path:
    """Path of the current log file; the previous one has the additional suffix ``.1``."""
    return run_dir / "run.log"


def read_tail(path: Path, num_lines: int) -> list[str]:
    """Return the last ``num_lines`` lines of the log at ``path``, oldest first, from at most the last MiB."""
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
    except OSError as error:  # user code can put anything there
        return f"{path.name} cannot be read: {error.strerror}\n".encode()


class AgentLogs:
    """Keeps the newest agent logs in the folder ``agents`` of a run's folder; without a run folder, keeps nothing."""

    def __init__(self, run_dir: Path | None, total_bytes: int = TOTAL_BYTES) -> None:
        self._folder = run_dir and run_dir / _FOLDER
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        # Includes logs of earlier processes of this start.
        self._kept = dict(_files_in(self._folder) if self._folder else [])
        """Size of each file, oldest first."""
        self._num_bytes = sum(self._kept.values())

    @classmethod
    def of_this_run(cls) -> "AgentLogs":
        """Return the agent logs of this process's run."""
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        return cls(Path(run_dir) if run_dir else None)

    def keep(self, uid: str, printed: str) -> None:
        """Store the output of rollout ``uid``'s agent, replacing that of earlier attempts. Thread-safe."""
        if self._folder is None:
            return
        path, content = self._folder / f"{uid}.log", printed.encode()
        try:
            self._folder.mkdir(FOLDER_MODE, exist_ok=True)
            with open(path, "wb", opener=opener) as file:
                file.write(content)
        except OSError as error:  # a full disk must not cost the rollout
            logger.warning("could not store the output of agent %s: %s", uid, error)
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
    """Return each log file with its size, oldest first."""
    found = [(path, path.stat()) for path in folder.glob("*.log")]
    return [(path, stat.st_size) for path, stat in sorted(found, key=lambda each: each[1].st_mtime_ns)]


def read_agent_log(run_dirs: Iterable[Path], uid: str) -> str | None:
    """Return the agent output of sample ``uid`` from the first folder that has it; None if there is none."""
    if not _UID.fullmatch(uid):  # untrusted: must not contain a path
        return None
    for run_dir in run_dirs:
        for name in (uid, _FORK.sub("", uid)):
            try:
                with open(run_dir / _FOLDER / f"{name}.log", "rb", opener=regular_opener) as file:
                    return file.read(TOTAL_BYTES).decode(errors="replace")
            except OSError:  # missing, or replaced by user code
                continue
    return None
