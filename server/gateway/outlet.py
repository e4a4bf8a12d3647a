"""The way of a stream's chunks from the task that reads them to the one that passes them on."""

import asyncio
from typing import Any

Json = dict[str, Any]


class Outlet:
    """Chunks that wait to be passed on: a slow agent does not hold up the reading, nor the engine."""

    def __init__(self) -> None:
        self.is_begun = False
        """Whether there was a chunk."""
        self._chunks: list[Json] = []
        self._news = asyncio.Event()
        self._is_closed = False

    def put(self, chunk: Json) -> None:
        """Add a chunk."""
        self.is_begun = True
        self._chunks.append(chunk)
        self._news.set()

    def close(self, *_: object) -> None:
        """There will be no more."""
        self._is_closed = True
        self._news.set()

    async def take(self) -> list[Json]:
        """All chunks that have come since the last time; waits for one. Empty at the end."""
        await self._news.wait()
        taken, self._chunks = self._chunks, []
        if not self._is_closed:
            self._news.clear()
        return taken
