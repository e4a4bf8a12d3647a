"""Pauses between retries, and time limits. Loads asyncio only where it is awaited, as blocking clients need none."""

import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.core.waiting import Signal


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``.

    Each is shortened at random unless ``is_exact``, so that many clients of one server do not retry all at once.
    """

    def __init__(self, first_s: float = 0.1, max_s: float = 10.0, *, is_exact: bool = False) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s
        self._is_exact = is_exact

    def next_s(self, asked_s: float | None = None) -> float:
        """Seconds of the next pause; at least ``asked_s`` if the other side asked for that."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        # Never earlier than asked: the other side is busy until then. Randomness spreads clients with the same wait.
        if asked_s is not None:
            return max(asked_s, self._first_s) * random.uniform(1.0, 1.1)
        return pause_s if self._is_exact else pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with ``first_s``, after a successful attempt."""
        self._next_s = self._first_s

    async def wait(self, asked_s: float | None = None) -> None:
        """Wait for the next pause, or for the ``asked_s`` seconds that the other side asked for."""
        import asyncio

        await asyncio.sleep(self.next_s(asked_s))


class Deadline:
    """A time limit that starts now, shared by one or several waits."""

    def __init__(self, wait_s: float) -> None:
        self._until_s = time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._until_s - time.monotonic())

    async def wait(self, signal: "Signal") -> bool:
        """Wait for ``signal``; False once the time is up."""
        return self.left_s > 0 and await signal.wait(self.left_s)
