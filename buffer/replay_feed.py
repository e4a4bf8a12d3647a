"""Writes a recording into a run of this buffer: through the ordinary write, in the order of delivery of its groups."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from forebay.buffer.buffer import LiveRun
from forebay.buffer.recorded_group import UNSTORED_BYTES, Change, Fed, GroupFeeder
from forebay.core.backoff import Backoff
from forebay.core.errors import BufferFull, StorageFailed
from forebay.core.records.rows import GroupRow, StoredSample, TickRow
from forebay.replay.errors import RecordingDamaged
from forebay.replay.source import Source

logger = logging.getLogger(__name__)

GROUPS_AT_A_TIME = 64
"""Number of groups whose columns are read together."""
UNSTORED_STEPS = 256
"""Maximum number of groups that wait for the disk."""
YIELD_BYTES = 1 << 20
ROOM_LOOK_S = 1.0

_Step = Callable[[LiveRun], Awaitable[Fed]]
"""A part of the recording that is written at once."""


@dataclass(slots=True)
class FeedCounts:
    """What has been replayed so far and is on disk."""

    hits: int = 0
    """Rollouts that are in the run."""
    tokens: int = 0
    """Their sampled tokens, if the samples contain them; only of rollouts that this feed wrote."""
    missing: int = 0
    """Samples that could not be replayed."""


class Feed:
    """Writes groups of a source into a run. Existing samples are skipped, so repeating it changes nothing."""

    def __init__(
        self, find: Callable[[], LiveRun], source: Source, groups: Sequence[GroupRow], *, change: Change | None = None
    ) -> None:
        """``find`` returns the current object of the run, which a recovery of the store replaces.

        ``groups`` are written in order, as fast as there is room.
        """
        self.counts = FeedCounts()
        self._find = find
        self._source = source
        self._groups = groups
        self._feeder = GroupFeeder(source, change)
        self._unsure: deque[tuple[_Step, Fed]] = deque()
        """Written parts that may not be on disk yet."""
        self._unsure_bytes = 0

    @property
    def lost(self) -> dict[str, str]:
        """Groups that could not be replayed, by id, and why."""
        return self._feeder.lost

    async def run(self) -> None:
        """Write everything, waiting for room and for the disk; returns once all of it is on disk."""
        num_bytes = 0
        async for step in self._steps():
            num_bytes += await self._do(step)
            if num_bytes > YIELD_BYTES:
                num_bytes = 0
                await asyncio.sleep(0)
        await self._do(_tick, is_last=True)

    async def _do(self, step: _Step, *, is_last: bool = False) -> int:
        """Run a step, repeating earlier steps that the disk has lost; return the bytes written."""
        todo, pauses, num_bytes, is_waiting = deque([step]), Backoff(0.2, 5.0), 0, False
        while todo:
            try:
                fed = await self._when_room(todo[0])
                num_bytes += fed.num_bytes
                self._unsure.append((todo.popleft(), fed))
                self._unsure_bytes += fed.num_bytes
                await self._confirm(is_last=is_last and not todo)
            except StorageFailed as error:
                if not is_waiting:
                    logger.warning("the replay waits: %s", error)
                is_waiting = True
                todo.extendleft(reversed([earlier for earlier, _ in self._unsure]))
                self._unsure.clear()
                self._unsure_bytes = 0
                await pauses.wait()
        return num_bytes

    async def _when_room(self, step: _Step) -> Fed:
        while True:
            entry = self._find()
            try:
                return await step(entry)
            except BufferFull:
                # The signal may belong to a replaced object by now, or be closed for good.
                if not await entry.buffer.news.wait(ROOM_LOOK_S):
                    await asyncio.sleep(ROOM_LOOK_S / 10)

    async def _confirm(self, *, is_last: bool) -> None:
        """Wait until the unstored parts are within the limits; for ``is_last``, until there are none."""
        self.count_stored()
        while self._unsure and (is_last or self._unsure_bytes > UNSTORED_BYTES or len(self._unsure) > UNSTORED_STEPS):
            _, fed = self._unsure[0]
            if fed.stored is not None:
                await asyncio.shield(fed.stored)  # a caller that cancels the feed counts afterwards what was stored
            self.count_stored()

    def count_stored(self) -> None:
        """Count what is on disk by now."""
        while self._unsure and _is_stored(self._unsure[0][1]):
            _, fed = self._unsure.popleft()
            self._unsure_bytes -= fed.num_bytes
            self.counts.hits += fed.num_hits
            self.counts.tokens += fed.num_tokens
            self.counts.missing += fed.num_missing

    async def await_stored(self) -> None:
        """After ``run`` was cancelled, count what the disk still stores. Raises ``StorageFailed``."""
        await self._confirm(is_last=True)

    async def _steps(self) -> AsyncIterator[_Step]:
        for start in range(0, len(self._groups), GROUPS_AT_A_TIME):
            part = self._groups[start : start + GROUPS_AT_A_TIME]
            for record, samples in zip(part, await self._columns(part), strict=True):
                yield partial(self._feeder.feed_group, record=record, samples=samples)

    async def _columns(self, groups: Sequence[GroupRow]) -> Sequence[Sequence[StoredSample]]:
        """Read the samples of each group; a group with a damaged row is lost."""
        pauses = Backoff(0.2, 5.0)
        while True:
            try:
                found = await self._source.samples([record.group_id for record in groups])
            except RecordingDamaged as error:
                if len(groups) > 1:
                    return [samples for record in groups for samples in await self._columns([record])]
                self._feeder.lose(groups[0], str(error))
                return [()]
            except StorageFailed as error:
                logger.warning("the replay waits for its recording: %s", error)
                await pauses.wait()
            else:
                for record in groups:
                    self._feeder.check_whole(record, found[record.group_id])
                return [found[record.group_id] for record in groups]


def _is_stored(fed: Fed) -> bool:
    stored = fed.stored
    return stored is None or (stored.done() and not stored.cancelled() and stored.exception() is None)


async def _tick(entry: LiveRun) -> Fed:
    """Return a result that completes once everything written before is on disk."""
    run_id, buffer = entry.run.run_id, entry.buffer
    return Fed(stored=buffer.record(TickRow(run_id=run_id, active_s=buffer.active.now_s())))
