"""Segments that are about to be removed."""

import asyncio


class Condemned:
    """Numbers of segments, each with the generation of the store's state in which the sentence was passed."""

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __contains__(self, segment: int) -> bool:
        return segment in self._generations

    def generation(self, segment: int) -> int:
        """When the segment was condemned. Raises ``KeyError`` if it is not."""
        return self._generations[segment]

    def add(self, segment: int, generation: int = 0) -> None:
        """Condemn a segment."""
        self._generations[segment] = generation
        self._is_empty.clear()

    def discard(self, segment: int) -> None:
        """It was spared, or is removed."""
        self._generations.pop(segment, None)
        if not self._generations:
            self._is_empty.set()

    async def wait_until_empty(self) -> None:
        """Return when no segment is condemned."""
        await self._is_empty.wait()
