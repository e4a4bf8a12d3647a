"""One thread that watches the workers of a backend: deadlines of calls, and silent workers."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)
_MOST_ENDED = 1000
"""Number of deadlines above which those of ended calls are removed."""


def beat_s(silence_s: float) -> float:
    """Interval of a worker's vitals, if it counts as dead after ``silence_s``."""
    return min(1.0, silence_s / 5)


class Watched(Protocol):
    """A watched worker."""

    def look(self) -> None:
        """Check that it is alive. Called every ``every_s``; must be quick."""


class WorkerWatch:
    """Checks workers and deadlines in a thread, which runs while there are workers to watch."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._changed = threading.Condition()
        self._watched: list[Watched] = []
        self._deadlines: list[tuple[float, int, Callable[[], bool], Callable[[], None]]] = []
        self._num_checked = _MOST_ENDED
        self._tie = itertools.count()
        self._wakes_s = 0.0
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Start watching a worker."""
        with self._changed:
            self._watched.append(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="workers watch", daemon=True)
                self._thread.start()

    def remove(self, watched: Watched) -> None:
        """Stop watching a worker. Does nothing if it is not watched."""
        with self._changed:
            if watched in self._watched:
                self._watched.remove(watched)
                self._changed.notify()

    @property
    def num_deadlines(self) -> int:
        """Number of stored deadlines, including those of ended calls."""
        return len(self._deadlines)

    def at(self, due_s: float, is_done: Callable[[], bool], act: Callable[[], None]) -> None:
        """Call ``act`` at ``due_s`` of the monotonic clock, unless ``is_done`` returns true then."""
        with self._changed:
            if len(self._deadlines) > self._num_checked:
                self._deadlines = [each for each in self._deadlines if not each[2]()]
                heapq.heapify(self._deadlines)
                self._num_checked = max(_MOST_ENDED, 2 * len(self._deadlines))
            heapq.heappush(self._deadlines, (due_s, next(self._tie), is_done, act))
            if due_s < self._wakes_s:
                self._changed.notify()

    def _run(self) -> None:
        looks_s = time.monotonic() + self._every_s
        while True:
            with self._changed:
                if not self._watched:
                    self._thread = None
                    return
                self._wakes_s = min([looks_s, *(each[0] for each in self._deadlines[:1])])
                self._changed.wait(max(0.0, self._wakes_s - time.monotonic()))
                now_s = time.monotonic()
                due = []
                while self._deadlines and self._deadlines[0][0] <= now_s:
                    due.append(heapq.heappop(self._deadlines))
                watched = list(self._watched) if now_s >= looks_s else []
            for _, _, is_done, act in due:
                if not is_done():
                    act()
            for each in watched:
                _look(each)
            if watched:
                looks_s = time.monotonic() + self._every_s


def _look(watched: Watched) -> None:
    try:
        watched.look()
    except Exception:  # noqa: BLE001 - other workers and all deadlines need this thread
        _log.exception("checking a worker failed")
