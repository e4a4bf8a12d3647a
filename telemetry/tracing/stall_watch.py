"""Sees when an event loop stands still: somebody's code computes in it, or sleeps, and everything else waits."""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

STALL_S = 1.0
_BEAT_S = 0.1
_MAX_FRAMES = 32
_LIBRARIES = os.path.dirname(os.__file__)
"""The standard library's folder, below which installed packages are too."""


class Stall(NamedTuple):
    """A standstill, by ``time.monotonic``. It is noted once while it lasts, and once when it has ended."""

    begun_s: float
    until_s: float
    stack: list[str]
    """Of the loop's thread a second after its last sign of life; empty where the interpreter was blocked too."""
    has_ended: bool


Listener = Callable[[Stall], object]
"""Told of a standstill, in the loop's thread or in another one."""


class StallWatch:
    """Watches the loop in which it is started."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._listeners: list[Listener] = []
        self._beat_s = time.monotonic()
        self._noted_s = 0.0
        self._stack: list[str] = []
        self._stopped = threading.Event()
        self._thread_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looking: threading.Thread | None = None

    def start(self) -> None:
        """Watch the running loop."""
        self._thread_id = threading.get_ident()
        self._beat_s = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def add(self, listener: Listener) -> None:
        """Tell ``listener``, too. The first one comes with a thread, which looks while the loop cannot."""
        self._listeners = [*self._listeners, listener]
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name="stall-watch", daemon=True)
            self._looking.start()

    def remove(self, listener: Listener) -> None:
        """Tell ``listener`` no more."""
        self._listeners = [each for each in self._listeners if each != listener]

    def stop(self) -> None:
        """Watch no more; in the loop's thread."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def blocked(self) -> tuple[float, str]:
        """Seconds, and ``file:line in function`` where it stands; ``(0.0, "")`` while it turns. From another thread."""
        silent_s = time.monotonic() - self._beat_s - _BEAT_S
        if silent_s < self._stall_s or self._stopped.is_set():
            return 0.0, ""
        return silent_s, _line_of(sys._current_frames().get(self._thread_id))

    def _beat(self) -> None:
        now, last = time.monotonic(), self._beat_s
        self._beat_s = now
        if now - last - _BEAT_S >= self._stall_s or self._noted_s == last:
            self._tell(last, now, has_ended=True)
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _look(self) -> None:
        wait_s = self._stall_s
        while not self._stopped.wait(wait_s):
            last = self._beat_s
            silent_s = time.monotonic() - last - _BEAT_S
            wait_s = max(self._stall_s - silent_s, _BEAT_S)
            if silent_s < self._stall_s or self._noted_s == last:
                continue
            self._stack = _stack(sys._current_frames().get(self._thread_id))
            if self._beat_s == last:
                self._noted_s = last
                self._tell(last, time.monotonic(), has_ended=False)

    def _tell(self, last_beat_s: float, now_s: float, *, has_ended: bool) -> None:
        # It began somewhere between the last beat and the one that did not come.
        stack = self._stack if self._noted_s == last_beat_s else []
        stall = Stall(last_beat_s + _BEAT_S / 2, now_s, stack, has_ended)
        for listener in self._listeners:
            listener(stall)


def _stack(frame: FrameType | None) -> list[str]:
    if frame is None:
        return []
    frames = traceback.extract_stack(frame, limit=_MAX_FRAMES)
    return [f"{each.filename}:{each.lineno} {each.name}" for each in frames]


def _line_of(innermost: FrameType | None) -> str:
    """Of the innermost code that is no library."""
    frame = innermost
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" if frame else ""
