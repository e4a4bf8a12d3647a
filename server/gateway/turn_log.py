"""Where the turns of a session go: in the order in which its calls ended, though some are looked up afterwards."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from forebay.engines.capture.turn import Turn

Asking = Coroutine[Any, Any, Sequence[Turn]]


class TurnLog:
    """Hands turns to ``take``, one call's after another's."""

    def __init__(self, take: Callable[[Sequence[Turn]], None]) -> None:
        self._take = take
        self._pending: list[asyncio.Task[None]] = []
        """In order; each waits for the one before it."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Turns that are known."""
        if self._pending:
            self.add_later(_known(turns))
        else:
            self._take(turns)

    def add_later(self, turns: Asking) -> None:
        """Turns of which something is still asked: nobody waits for that but who looks at the record."""
        before = self._pending[-1] if self._pending else None
        task = asyncio.create_task(self._add(before, turns))
        self._pending.append(task)
        task.add_done_callback(self._pending.remove)
        task.add_done_callback(lambda _: turns.close())  # a task that is cancelled at once never starts it

    async def settled(self) -> None:
        """Return when everything that was added has been handed on."""
        while self._pending:
            await asyncio.wait(self._pending)

    def drop(self) -> None:
        """Hand on nothing more."""
        for task in self._pending:
            task.cancel()

    async def _add(self, before: asyncio.Task[None] | None, turns: Asking) -> None:
        known = await turns
        if before is not None:
            await asyncio.wait([before])
        self._take(known)


async def _known(turns: Sequence[Turn]) -> Sequence[Turn]:
    return turns
