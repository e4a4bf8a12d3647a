"""An exported file as a source: a ``RecordingReader`` in threads, so that no event loop waits for the disk."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord
from forebay.replay.recording_reader import RecordingReader
from forebay.replay.recording_schema import MAX_BODY_BYTES
from forebay.replay.source import Source


class RecordingFile(Source):
    """The file ``path``. Leave it with ``async with``, or ``close`` it."""

    def __init__(self, path: Path | str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Raises ``FileNotFoundError``, ``NotRecorded``; ``RecordingDamaged`` for no recording, or a newer format."""
        self.recording = RecordingReader(path, max_body_bytes)
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
        """Let go of the file."""
        self.recording.close()

    @property
    def run(self) -> RunRecord:
        """What it is a recording of."""
        return self._run

    async def groups(self) -> Sequence[GroupRecord]:
        """Every group that can be read, in the order in which they opened."""
        return await asyncio.to_thread(self.recording.groups)

    async def batches(self) -> Sequence[BatchRecord]:
        """Every batch that can be read, by its number."""
        return await asyncio.to_thread(self.recording.batches)

    async def samples(self, group_ids: Sequence[str]) -> Mapping[str, Sequence[SampleRecord]]:
        """By group, all that name it. Raises ``RecordingDamaged`` unless all of them can be read."""
        return await asyncio.to_thread(lambda: {key: self.recording.samples(key) for key in group_ids})

    def has_body(self, sample: SampleRecord) -> bool:  # noqa: ARG002 - as a source is asked
        """A file has every body."""
        return True

    async def bodies(self, samples: Sequence[SampleRecord]) -> Sequence[bytes]:
        """Their bodies, in that order. Raises ``RecordingDamaged`` for one that is damaged."""
        return await asyncio.to_thread(lambda: [self.recording.body(each) for each in samples])

    def left_out(self) -> Mapping[str, str]:
        """By id, the groups that the file has without their samples, and why."""
        return {key: each.reason for key, each in self.recording.left_out.items()}

    def damage(self) -> Sequence[str]:
        """What ``groups`` and ``batches`` left out."""
        return [str(each) for each in self.recording.damage]
