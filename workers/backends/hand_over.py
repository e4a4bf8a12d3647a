"""A thread of our own for what a library tells us in one of its own, in which nothing may wait."""

import logging
import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]
_log = logging.getLogger(__name__)


class HandOver:
    """Runs work in order. Its thread is there while somebody needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_users = 0
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def acquire(self) -> None:
        """Somebody needs the thread from now on."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._work = queue.SimpleQueue()
                threading.Thread(target=_run, args=(self._work,), name=self._name, daemon=True).start()

    def release(self) -> None:
        """Nobody needs the thread any more who did: what is given to it later may never run."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._work.put(None)

    def soon(self, work: Work) -> None:
        """Run this after all that was given before. From any thread; waits for nothing."""
        self._work.put(work)


def _run(given: "queue.SimpleQueue[Work | None]") -> None:
    while (work := given.get()) is not None:
        try:
            work()
        except Exception:  # noqa: BLE001 - what comes after it has nothing to do with it
            _log.exception("an answer could not be taken")
