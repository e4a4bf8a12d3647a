"""Detects blocked event loops: code computes or sleeps in the loop, and everything else waits."""

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
"""The folder of the standard library, which contains installed packages, too."""


class Stall(NamedTuple):
    """A stall, by ``time.monotonic``. It is reported once while it lasts, and once when it has ended."""

    begun_s: float
    until_s: float
    stack: list[str]
    """The loop thread's stack, a second after its last heartbeat; empty if the whole interpreter was blocked."""
    has_ended: bool


Listener = Callable[[Stall], object]
"""Called with a stall, in the loop's thread or another one."""


class StallWatch:
    """Watches the event loop in which it is started."""

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
        """Add a listener. The first one starts a thread that looks while the loop is blocked."""
        self._listeners = [*self._listeners, listener]
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name="stall-watch", daemon=True)
            self._looking.start()

    def remove(self, listener: Listener) -> None:
        """Remove a listener."""
        self._listeners = [each for each in self._listeners if each != listener]

    def stop(self) -> None:
        """Stop watching; call this in the loop's thread."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def blocked(self) -> tuple[float, str]:
        """Seconds blocked, and ``file:line in function``; ``(0.0, "")`` if not blocked. Call it from another thread."""
        silent_s = time.monotonic() - self._beat_s - _BEAT_S
        if silent_s < self._stall_s or self._stopped.is_set():
            return 0.0, ""
        return silent_s, _line_of(sys._current_frames().get(self._thread_id))

    def _beat(self) -> None:
        now, last = time.monotonic(), self._beat_s
        self._beat_s = now
        if now - last - _BEAT_S >= self._stall_s or self._noted_s == last:
            self._report(last, now, has_ended=True)
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
                self._report(last, time.monotonic(), has_ended=False)

    def _report(self, last_beat_s: float, now_s: float, *, has_ended: bool) -> None:
        # The stall began between the last beat and the missing one.
        stack = self._stack if self._noted_s == last_beat_s else []
        stall = Stall(last_beat_s + _BEAT_S / 2, now_s, stack, has_ended)
        for listener in self._listeners:
            listener(stall)


def _stack(frame: FrameType | None) -> list[str]:
    frames = traceback.extract_stack(frame, limit=_MAX_FRAMES) if frame is not None else []
    return [f"{each.filename}:{each.lineno} {each.name}" for each in frames]


def _line_of(innermost: FrameType | None) -> str:
    """Describe the innermost frame that is not library code."""
    frame = innermost
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" if frame else ""
