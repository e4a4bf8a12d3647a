"""Pauses between tries."""

import asyncio
import random


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, each shortened by chance: clients must not come all at once."""

    def __init__(self, first_s: float = 0.1, max_s: float = 10.0) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def next_s(self, told_s: float | None = None) -> float:
        """Seconds of the next pause; not less than what the other side asked for."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        if told_s is not None:
            return max(told_s, self._first_s) * random.uniform(1.0, 1.1)
        return pause_s * random.uniform(0.5, 1.0)

    async def wait(self, told_s: float | None = None) -> None:
        """Wait the next pause, or the ``told_s`` seconds that the other side asked for."""
        await asyncio.sleep(self.next_s(told_s))
