"""A recorded group, put into a run through the ordinary write: as then, but for the time that it took."""

import asyncio
import logging
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forebay.buffer import admission
from forebay.buffer.buffer import LiveRun
from forebay.buffer.groups.groups import Groups
from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import stretches
from forebay.core.errors import BodyUnreadable
from forebay.core.group import DiscardReason, GroupState
from forebay.core.records.rows import GroupRow, SampleRow, StoredSample
from forebay.core.sample import Incoming
from forebay.replay.errors import RecordingDamaged
from forebay.replay.recorded_sample import incoming
from forebay.replay.replayed_bodies import sampled_tokens, splice
from forebay.replay.source import Recorded, Source

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Of bodies that are read at a time, before other work gets its turn; a longer one stands alone."""
UNSTORED_BYTES = 8 << 20
"""Of bodies that may wait for the disk."""

Change = Callable[[Sequence[Recorded]], Awaitable[Sequence[Recorded]]]
"""Makes other samples of those that were recorded, in their order: with another reward, for example."""


@dataclass(slots=True)
class Fed:
    """What became of a piece of a recording."""

    num_hits: int = 0
    """Rollouts that are in the run."""
    num_missing: int = 0
    """Samples of which the body, or a row, is gone or damaged; and those that go with them, since a group is whole."""
    num_tokens: int = 0
    num_bytes: int = 0
    stored: "Future[Any] | None" = None
    """Done when the disk has all of it."""


@dataclass(slots=True)
class GroupFeeder:
    """Puts recorded groups into the run of an entry.

    What is in it already is left alone, so that anything may be put in again. ``feed_group`` raises ``BufferFull``,
    before anything of a group is in, and ``StorageFailed``.
    """

    source: Source
    change: Change | None = None
    lost: dict[str, str] = field(default_factory=dict)
    """By group, why it was not replayed."""

    async def feed_group(self, entry: LiveRun, record: GroupRow, samples: Sequence[StoredSample]) -> Fed:
        """All of a group at once, so that no reader sees a part of it; it is closed if it was closed short."""
        buffer, fed = entry.buffer, Fed()
        members = await self._fresh(entry, record, [each for each in samples if each.row.outcome == "member"])
        others = await self._fresh(entry, record, [each for each in samples if each.row.outcome != "member"])
        is_to_close = self._is_to_close(buffer, record)
        known = buffer.groups.by_id.get(record.group_id)
        fed.num_hits = sum(map(_is_rollout, samples))
        if members or others or is_to_close:
            admission.check_room(buffer, record.instance_id, record.epoch, buffer.active.now_s())
            parts = list(stretches_of_bodies(members))
            first = await self._read(record, parts[0]) if parts else []
            async with buffer.lock:
                buffer.check_storage()
                await self._put_members(buffer, record, first, parts[1:], fed)
                if self._is_to_close(buffer, record):
                    await self._close(entry, record, fed)
        elif known is not None and known.state is GroupState.OPEN:
            buffer.groups.changed.setdefault(record.group_id, known)  # it was held back when the run was loaded
        for sample in others:
            fed.num_missing += not await self._put(buffer, record, sample, fed)
        return self._counted(fed, record)

    # --- what is to be done

    async def _fresh(self, entry: LiveRun, record: GroupRow, samples: Sequence[StoredSample]) -> list[StoredSample]:
        """Those that are not in the run; what memory must know of their group it knows from then on."""
        gone = entry.buffer.gone
        entry.buffer.check_storage()
        if not gone.knows(record.instance_id, record.epoch):
            await gone.look_up([(record.instance_id, record.epoch)])
        if record.group_id in self.lost:
            return []
        return [each for each in samples if each.row.uid not in entry.buffer.uids]

    def _is_to_close(self, buffer: RunBuffer, record: GroupRow) -> bool:
        """Whether the group is open, or never was there, and will not be closed by its readers."""
        group, is_lost = buffer.groups.by_id.get(record.group_id), record.group_id in self.lost
        if group is None:
            return is_lost or (bool(record.closed_seq) and not record.num_samples)
        if group.state is not GroupState.OPEN:
            return False
        is_stale = record.reason == DiscardReason.STALE
        return is_lost or is_stale or (bool(record.closed_seq) and not buffer.groups.is_full(group))

    def _counted(self, fed: Fed, record: GroupRow) -> Fed:
        if record.group_id in self.lost:
            fed.num_hits, fed.num_missing = 0, max(1, record.num_samples)
        return fed

    async def _read(self, record: GroupRow, samples: Sequence[StoredSample]) -> Sequence[Recorded]:
        """Samples with their bodies; none if one of them cannot be read, and then the group is noted as lost."""
        try:
            recorded = await self.source.recorded(samples)
        except (BodyUnreadable, RecordingDamaged) as error:
            first = samples[0].row
            if first.outcome == "member":
                self.lose(record, str(error))
            else:
                logger.warning("sample %r, which was %s, is not replayed: %s", first.uid, first.outcome, error)
            return []
        return recorded if self.change is None else await self.change(recorded)

    def check_whole(self, record: GroupRow, samples: Sequence[StoredSample]) -> None:
        """Note a group as lost of whose samples some are not recorded any more: a damaged journal sets them aside."""
        if (num_there := sum(map(_is_rollout, samples))) < record.num_samples:
            self.lose(record, f"{num_there} of its {record.num_samples} samples are there")

    def lose(self, record: GroupRow, why: str) -> None:
        """A group cannot be replayed."""
        named = (record.group_id, record.instance_id, record.epoch)
        logger.warning("group %s (%r, epoch %d) is not replayed: %s", *named, why)
        self.lost[record.group_id] = why

    # --- doing it

    async def _put_members(
        self,
        buffer: RunBuffer,
        record: GroupRow,
        recorded: Sequence[Recorded],
        rest: Sequence[Sequence[StoredSample]],
        fed: Fed,
    ) -> None:
        """What was read, and what is to be read. With the lock held: nobody looks at a group that is half there."""
        num_waiting = self._write_all(buffer, recorded, fed)
        for part in rest:
            if record.group_id in self.lost:
                return
            if num_waiting > UNSTORED_BYTES and fed.stored is not None:
                await fed.stored
                num_waiting = 0
            num_waiting += self._write_all(buffer, await self._read(record, part), fed)
            await asyncio.sleep(0)

    async def _put(self, buffer: RunBuffer, record: GroupRow, sample: StoredSample, fed: Fed) -> bool:
        """A single sample; false if its body cannot be read."""
        recorded = await self._read(record, [sample])
        buffer.check_storage()
        self._write_all(buffer, recorded, fed)
        return bool(recorded)

    def _write_all(self, buffer: RunBuffer, recorded: Sequence[Recorded], fed: Fed) -> int:
        before = fed.num_bytes
        for each in recorded:
            self._write(buffer, each, fed)
        return fed.num_bytes - before

    def _write(self, buffer: RunBuffer, recorded: Recorded, fed: Fed) -> None:
        sample, body = recorded
        body = splice(body, self.source.run.run_id, sample.uid)
        decide = None if sample.outcome == "member" else partial(_as_then, sample)
        receipt = admission.write(buffer, incoming(sample, body), decide)
        fed.stored = receipt.stored
        fed.num_bytes += len(body)
        if not receipt.is_duplicate:
            fed.num_tokens += sampled_tokens(body)

    async def _close(self, entry: LiveRun, record: GroupRow, fed: Fed) -> None:
        buffer, why = entry.buffer, self.lost.get(record.group_id)
        if record.group_id not in buffer.groups.by_id:  # it never had a sample
            await admission.announce(buffer, [(record.instance_id, record.epoch)])
        group = buffer.groups.by_id[record.group_id]
        if why is not None:
            detail = f"it could not be replayed: {why}"
            buffer.move(group, GroupState.DISCARDED, DiscardReason.UNREADABLE, detail)
        elif record.reason == DiscardReason.STALE:
            # Of when the trainer had which weights nothing is known any more.
            await entry.group_judge.evaluate()
            if group.state in (GroupState.OPEN, GroupState.READY):
                buffer.move(group, GroupState.DISCARDED, DiscardReason.STALE, "as in the recording")
        else:
            await entry.deadlines.close_short(group, was_salvaged=record.is_salvaged)
        fed.stored = buffer.record(group.row)


def _is_rollout(sample: StoredSample) -> bool:
    return sample.row.outcome == "member" and not sample.row.fork


def stretches_of_bodies(samples: Sequence[StoredSample]) -> Iterator[Sequence[StoredSample]]:
    """``samples`` in parts whose bodies may be in memory together: up to ``CHUNK_BYTES``."""
    return (part for part, _ in stretches(samples, lambda sample: sample.location.length, CHUNK_BYTES))


def _as_then(sample: SampleRow, groups: Groups, _sample: Incoming, now_s: float) -> admission.Placement:
    """Where a late or surplus sample belongs: it was decided by when it came."""
    group = groups.by_id.get(sample.group_id) or SampleGroup(groups.new_row(sample.instance_id, sample.epoch, now_s))
    return admission.Placement(group, sample.slot, sample.outcome)
