"""The rollouts of a run that have come to their caps: whoever runs their agents asks for all of them at once."""

import asyncio
from collections import deque
from contextlib import suppress
from itertools import islice

from forebay.core.waiting import Signal

MAX_NAMES = 10_000
"""Newest that are kept: those before them have been told long since."""


class BrokenRollouts:
    """Numbered in the order in which they came to their caps, from 1.

    They are kept in memory only: a gateway that was started again counts anew.
    """

    def __init__(self) -> None:
        self.num = 0
        """So far."""
        self._names: deque[str] = deque(maxlen=MAX_NAMES)
        self._news = Signal()

    def add(self, rollout_id: str) -> None:
        """One more."""
        self.num += 1
        self._names.append(rollout_id)
        self._news.notify()

    async def after(self, number: int, limit_s: float) -> list[str]:
        """Those that came after the ``number``-th; waits up to so many seconds for one.

        All of them where there are not so many: whoever asks has counted those of another process.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while number == self.num:
                    await self._news.wait(limit_s)
        num_new = self.num if number > self.num else self.num - number
        return list(islice(self._names, max(0, len(self._names) - num_new), None))
