"""Writes events in the layout of verl's multi-turn profile: one line of JSON per event, when it ends."""

import fcntl
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.files import make_folder, opener

logger = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class EventLog:
    """Appends events to files, each line with a single write. Safe for any thread and any number of processes.

    ``forebay profile`` reads ``{dir}/step_{n}/worker_{id}.jsonl``. Events that cannot be written, as on a full disk,
    are lost. The first loss is logged.
    """

    def __init__(self) -> None:
        self._has_warned = False

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
            _append(os.fspath(path), msgspec.json.encode(known, enc_hook=str) + b"\n")
        except Exception as error:  # noqa: BLE001 - neither a full disk nor an unencodable value may fail a rollout
            if not self._has_warned:
                self._has_warned = True
                logger.warning("events are lost (logged once): %s", error)


def _append(path: str, line: bytes) -> None:
    try:
        fd = opener(path, _FLAGS)
    except FileNotFoundError:
        make_folder(Path(path).absolute().parent)
        fd = opener(path, _FLAGS)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # other threads and processes append to the same file
        size = os.fstat(fd).st_size
        if os.write(fd, line) < len(line):
            os.ftruncate(fd, size)
            raise OSError("only part of a line was written")
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile keeps the file open
        os.close(fd)
