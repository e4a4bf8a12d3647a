"""Time as an argument: the system's clock, one that a test moves by hand, and a run's own time."""

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Where a component reads time from."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
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
    """A clock that stands still until ``advance`` is called. For tests, ours and users'."""

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
    """A run's own time: counts while it is running, from what was counted before. Deadlines count in it."""

    def __init__(self, clock: Clock, counted_s: float = 0.0) -> None:
        self._clock = clock
        self._counted_s = counted_s
        self._since_s: float | None = None
        self.on_change: Callable[[], object] = lambda: None
        """Called when it begins to count, and when it begins to stand still."""

    @property
    def is_running(self) -> bool:
        return self._since_s is not None

    def now_s(self) -> float:
        """Active seconds counted so far."""
        if self._since_s is None:
            return self._counted_s
        return self._counted_s + self._clock.monotonic() - self._since_s

    def run(self, is_running: bool) -> None:
        """Let it count, or let it stand still."""
        # Asked again and again with the same answer, which must not begin a second count.
        if is_running == self.is_running:
            return
        if is_running:
            self._since_s = self._clock.monotonic()
        else:
            self._counted_s = self.now_s()
            self._since_s = None
        self.on_change()
