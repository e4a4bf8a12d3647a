"""The end of the server's process, whatever hangs: a thread that ends it when the seconds for that are over.

What was acknowledged is on the disk by then: the process may end at any instant, as by ``kill -9``.
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
"""So much before the limit it acts: the kernel, too, takes its time to end a large process."""


class HardStop:
    """Enter it around the life of the server; ``begin`` counts ``limit_s`` from the first call."""

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
        """The server is asked to end: it ends by itself in time, or is ended with this exit status."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._wait, args=(status,), name="forebay-hard-stop", daemon=True).start()

    def _wait(self, status: int) -> None:
        if self._is_over.wait(max(0.0, self._limit_s - MARGIN_S)):
            return
        names = sorted({thread.name for thread in threading.enumerate()} - {threading.current_thread().name})
        logger.error(
            "the server has not ended within stop_limit_s (%g s): what is left is killed, and what was acknowledged is"
            " on the disk. Child processes: %s; threads: %s",
            self._limit_s,
            ", ".join(map(str, children())) or "none",
            ", ".join(names),
        )
        _kill_children()
        os._exit(status)


def _kill_children() -> None:
    # Also orphans that came to the server, stopped before they could ask to die with who had started them. What users'
    # code put into a session of its own is a child of the server, too, once its parent has ended: it goes on.
    for pid in children():
        with suppress(OSError):
            if is_own_program(pid):
                os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """The pids of this process's children; none where the system does not tell."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found
