"""An exported file as a source. A ``Recording`` is read in threads, so that the event loop never waits for the disk."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import BatchRow, GroupRow, StoredSample
from forebay.replay.recording import MAX_BODY_BYTES, Recording
from forebay.replay.source import Source


class RecordingFile(Source):
    """The file ``path``. Use ``async with``, or ``close`` it."""

    def __init__(self, path: Path | str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Raises ``FileNotFoundError``, ``NotRecorded``; ``RecordingDamaged`` if it is damaged or not a recording."""
        self.recording = Recording(path, max_body_bytes)
        try:
            self._run = self.recording.run
        except BaseException:
            self.recording.close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.recording.close()

    @property
    def run(self) -> RecordedRun:
        """The recorded run."""
        return self._run

    async def groups(self) -> Sequence[GroupRow]:
        """Every group, in the order in which they opened."""
        return self.recording.groups()

    async def batches(self) -> Sequence[BatchRow]:
        """Every batch, by its number."""
        return self.recording.batches()

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[StoredSample]]:
        """By group, all samples that name it. Raises ``RecordingDamaged`` for a group in ``left_out``."""
        return await asyncio.to_thread(lambda: {key: self.recording.samples(key) for key in group_ids})

    def has_body(self, sample: StoredSample) -> bool:  # noqa: ARG002 - part of the protocol
        """Always true: a file has every body."""
        return True

    async def bodies(self, samples: Sequence[StoredSample]) -> Sequence[bytes]:
        """The bodies of samples, in this order. Raises ``RecordingDamaged`` if one is damaged."""
        return await asyncio.to_thread(self.recording.bodies, samples)

    def left_out(self) -> Mapping[str, str]:
        """By id, the groups that were exported without their samples, and why."""
        return {key: each.reason for key, each in self.recording.left_out.items()}
