"""Time as an argument: the system's clock, and one that a test moves by hand."""

import time
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
