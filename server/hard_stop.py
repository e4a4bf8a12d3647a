"""Ends the server's process on time, whatever hangs: a thread kills it when its time limit has passed.

Acknowledged data is on disk by then, so the process may end at any instant, as it would with ``kill -9``.
"""

import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from forebay.core.child_process import is_own_program

logger = logging.getLogger(__name__)

MARGIN_S = 0.5
"""Acts this many seconds before the limit, because the kernel needs time to end a large process."""


class HardStop:
    """Wraps the life of the server; the first ``begin`` starts the time limit ``limit_s``."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_over = threading.Event()
        self._begun = False

    def __enter__(self) -> "HardStop":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        _kill_children()

    def begin(self, status: int) -> None:
        """Start the time limit; a server that has not ended by then is killed with this exit status."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._wait, args=(status,), name="forebay-hard-stop", daemon=True).start()

    def _wait(self, status: int) -> None:
        if self._is_over.wait(max(0.0, self._limit_s - MARGIN_S)):
            return
        names = sorted({thread.name for thread in threading.enumerate()} - {threading.current_thread().name})
        logger.error(
            "the server has not ended within stop_limit_s (%g s): it is killed now, and what was acknowledged is"
            " on the disk. Child processes: %s; threads: %s",
            self._limit_s,
            ", ".join(map(str, children())) or "none",
            ", ".join(names),
        )
        _kill_children()
        os._exit(status)


def _kill_children() -> None:
    # Also orphans that the server adopted: killed before they could ask to die with their parent. Processes that users'
    # code put into their own session become children too when their parent ends; they keep running.
    for pid in children():
        with suppress(OSError):
            if is_own_program(pid):
                os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """The pids of this process's children; none if the system does not list them."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found
