"""Runs whose engines stand still on this server's word: told to the buffer, where their deadlines stand still too."""

import logging
from collections.abc import Callable

from forebay.buffer.buffer import Buffer
from forebay.core.errors import RunNotFound
from forebay.core.run import Run

logger = logging.getLogger(__name__)


class PauseMarks:
    """What the buffer's runs say about pauses."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def marked(self) -> list[str]:
        """The ids of the runs that are marked as paused, by an earlier life of the server perhaps."""
        return [entry.run.run_id for entry in self._buffer.entries if entry.run.is_paused]

    async def mark(self, run_id: str, is_paused: Callable[[], bool]) -> None:
        """Write down whether the run is paused, as it then is. Waits out a full disk."""

        def change(run: Run) -> None:
            run.is_paused = is_paused()

        try:
            await self._buffer.update(run_id, change)
        except RunNotFound:
            logger.warning("the engines of run %s are paused, which the buffer does not know", run_id)
