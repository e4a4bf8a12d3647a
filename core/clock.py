"""Time as an argument: the system's clock, one that a test moves by hand, and a run's own time."""

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Source of the current time for a component."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never decreases."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when ``advance`` is called. For Forebay's tests and users' tests."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds``."""
        self._now_s += seconds


class ActiveClock:
    """Counts a run's active time, starting from ``counted_s``; deadlines are measured in it."""

    def __init__(self, clock: Clock, counted_s: float = 0.0) -> None:
        self._clock = clock
        self._counted_s = counted_s
        self._since_s: float | None = None
        self.on_change: Callable[[], object] = lambda: None
        """Called whenever the clock starts or stops counting."""

    @property
    def is_running(self) -> bool:
        return self._since_s is not None

    def now_s(self) -> float:
        """Active seconds counted so far."""
        if self._since_s is None:
            return self._counted_s
        return self._counted_s + self._clock.monotonic() - self._since_s

    def run(self, is_running: bool) -> None:
        """Start or stop counting."""
        # Called repeatedly with the same value, which must not start a second count.
        if is_running == self.is_running:
            return
        if is_running:
            self._since_s = self._clock.monotonic()
        else:
            self._counted_s = self.now_s()
            self._since_s = None
        self.on_change()
