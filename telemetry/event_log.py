"""Writes events in the layout of verl's multi-turn profile: one line of JSON per event, when it ends."""

import atexit
import fcntl
import logging
import os
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.files import make_folder, opener

logger = logging.getLogger(__name__)

MAX_OPEN = 64
"""Maximal number of open files. Each step and worker has a new file, and no call says that a step is over."""


class EventLog:
    """Appends events to files, each line with a single write. Safe for any thread and any number of processes.

    ``forebay profile`` reads ``{dir}/step_{n}/worker_{id}.jsonl``. Events that cannot be written, as on a full disk,
    are lost. The first loss is logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._has_warned = False
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._after_fork)

    def log(
        self,
        path: str | os.PathLike[str],
        event: str,
        duration: float | None = None,
        extra: dict[str, Any] | None = None,
        workid: int | str | None = None,
        step: int | None = None,
        **keys: Any,
    ) -> None:
        """Append ``event``, which ends now and took ``duration`` seconds, to the file ``path``. Creates its folders.

        Arguments that are None are left out.
        """
        record = {
            "timestamp": datetime.now().isoformat(),
            "event": event,
            "duration_sec": duration,
            "extra": extra,
            "workid": workid,
            "step": step,
            **keys,
        }
        known = {name: value for name, value in record.items() if value is not None}
        try:
            self._append(os.fspath(path), msgspec.json.encode(known, enc_hook=str) + b"\n")
        except Exception as error:  # noqa: BLE001 - neither a full disk nor an unencodable value may fail a rollout
            self._warn(error)

    def close(self) -> None:
        """Close the files. A later write opens its file again."""
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])

    def _append(self, path: str, line: bytes) -> None:
        with self._lock:
            fd = self._fds.get(path)
            if fd is None:
                while len(self._fds) >= MAX_OPEN:
                    os.close(self._fds.pop(next(iter(self._fds))))
                fd = self._fds[path] = self._open(path)
            # Other processes append to the same file.
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                size = os.fstat(fd).st_size
                if os.write(fd, line) < len(line):
                    os.ftruncate(fd, size)
                    raise OSError("only part of a line was written")
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    @staticmethod
    def _open(path: str) -> int:
        make_folder(Path(path).absolute().parent)
        return opener(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("events are lost (logged once): %s", error)

    def _after_fork(self) -> None:
        # A new lock, since a thread of the parent may hold the old one, and new files: file locks belong to open files.
        self._lock = threading.Lock()
        while self._fds:
            os.close(self._fds.popitem()[1])
