"""The one thread of a process that writes traces: every half second it sees to all of them."""

import atexit
import logging
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Protocol

EVERY_S = 0.5

logger = logging.getLogger(__name__)


class Flushed(Protocol):
    """What the thread sees to."""

    def flush(self) -> None:
        """Write what is there. Never raises."""

    def note_long(self) -> None:
        """Note what has been open for long. Never raises."""

    def after_fork(self) -> None:
        """In a forked process: let go of what is its parent's."""


class FlushThread:
    """Started with the first record; in a forked process again, once there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._tracers: list[Flushed] = []
        self._all: weakref.WeakSet[Flushed] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._flush_all)

    def know(self, tracer: Flushed) -> None:
        """Tell ``tracer`` in every forked process, whether there is something to write or not."""
        self._all.add(tracer)

    def see_to(self, tracer: Flushed) -> None:
        """Write what ``tracer`` has, now and then, from now on."""
        with self._lock:
            if tracer not in self._tracers:
                self._tracers.append(tracer)
            if self._thread is None:
                self._flush_at_end()
                thread = threading.Thread(target=self._run, name="trace", daemon=True)
                # An interpreter that ends starts none; what is there is then written at its end.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def leave(self, tracer: Flushed) -> None:
        """Forget ``tracer``."""
        with self._lock:
            if tracer in self._tracers:
                self._tracers.remove(tracer)

    def hurry(self) -> None:
        """Write soon: much is waiting."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            for tracer in list(self._tracers):
                self._see_to_one(tracer)

    def _see_to_one(self, tracer: Flushed) -> None:
        try:
            tracer.note_long()
            tracer.flush()
        except Exception:  # what goes wrong with one trace must not end those of all others
            self.leave(tracer)
            logger.exception("a trace ends here, the rollouts go on")

    def _flush_all(self) -> None:
        for tracer in list(self._tracers):
            tracer.flush()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = None
        self._tracers = []
        for tracer in self._all:
            tracer.after_fork()

    def _flush_at_end(self) -> None:
        """The children of ``multiprocessing`` leave without the functions of ``atexit``."""
        module = sys.modules.get("multiprocessing.util")
        if module is None:
            return
        from multiprocessing import parent_process

        if parent_process() is not None:
            module.Finalize(None, self._flush_all, exitpriority=0)


FLUSH_THREAD = FlushThread()
"""That of this process."""
