"""Sees when an event loop stands still: somebody's code computes in it, or sleeps, and everything else waits."""

import asyncio
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Protocol

from forebay.telemetry.tracing.records import LoopStall

STALL_S = 1.0
_BEAT_S = 0.1
_MAX_FRAMES = 32


class StallSink(Protocol):
    """Takes what is noted, from any thread: a ``Tracer``, or what stands for several."""

    def at(self, monotonic_s: float) -> int:
        """The trace's time for one of ``time.monotonic``."""

    def write(self, record: LoopStall) -> None:
        """Take a record."""


class LoopWatch:
    """Watches the loop in which it is started. A standstill is noted once while it lasts, and once when it has ended.

    The stack is that of the loop's thread a second after its last sign of life.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._tracers: list[StallSink] = []
        self._beat_s = 0.0
        self._noted_s = 0.0
        self._stack: list[str] = []
        self._stopped = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, *tracers: StallSink) -> None:
        """Watch the running loop, and write to ``tracers``."""
        self._tracers = list(tracers)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beat_s = time.monotonic()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def add(self, tracer: StallSink) -> None:
        """Write to ``tracer`` too."""
        self._tracers = [*self._tracers, tracer]

    def remove(self, tracer: StallSink) -> None:
        """Write to ``tracer`` no more."""
        self._tracers = [each for each in self._tracers if each is not tracer]

    def stop(self) -> None:
        """Watch no more; in the loop's thread."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if self._stopped.is_set() or self._loop is None:
            return
        now, last = time.monotonic(), self._beat_s
        self._beat_s = now
        if now - last - _BEAT_S >= self._stall_s or self._noted_s == last:
            self._write(last, now, has_ended=True)
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
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
                self._write(last, time.monotonic(), has_ended=False)

    def _write(self, last_beat_s: float, now_s: float, *, has_ended: bool) -> None:
        # It began somewhere between the last beat and the one that did not come.
        begun_s = last_beat_s + _BEAT_S / 2
        stack = self._stack if self._noted_s == last_beat_s else []
        for tracer in self._tracers:
            began = tracer.at(begun_s)
            lasted = tracer.at(now_s) - began
            tracer.write(LoopStall(t=began, d=lasted, stack=stack, has_ended=has_ended))


def _stack(frame: FrameType | None) -> list[str]:
    if frame is None:
        return []
    frames = traceback.extract_stack(frame, limit=_MAX_FRAMES)
    return [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
