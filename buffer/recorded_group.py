"""Writes a recorded group into a run through the ordinary write: as recorded, except for the time that it took."""

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
"""Bytes of bodies read at a time, before other work gets a turn; a longer body is read alone."""
UNSTORED_BYTES = 8 << 20
"""Maximum bytes of bodies that wait for the disk."""

Change = Callable[[Sequence[Recorded]], Awaitable[Sequence[Recorded]]]
"""Replaces recorded samples, in order, for example with ones that have another reward."""


@dataclass(slots=True)
class Fed:
    """The result of writing a part of a recording."""

    num_hits: int = 0
    """Rollouts that are in the run."""
    num_missing: int = 0
    """Samples whose body or row is missing or damaged, and the rest of their groups, which must be complete."""
    num_tokens: int = 0
    num_bytes: int = 0
    stored: "Future[Any] | None" = None
    """Completes when the disk has all of it."""


@dataclass(slots=True)
class GroupFeeder:
    """Writes recorded groups into a run.

    Existing samples are skipped, so writing may be repeated. ``feed_group`` raises ``BufferFull``,
    before it has written anything of a group, and ``StorageFailed``.
    """

    source: Source
    change: Change | None = None
    lost: dict[str, str] = field(default_factory=dict)
    """Why a group was not replayed, by group id."""

    async def feed_group(self, entry: LiveRun, record: GroupRow, samples: Sequence[StoredSample]) -> Fed:
        """Write a whole group at once, so that no reader sees a part of it; close it if it was closed incomplete."""
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
        """Samples that are not in the run yet; loads what memory must know about their group."""
        gone = entry.buffer.gone
        entry.buffer.check_storage()
        if not gone.knows(record.instance_id, record.epoch):
            await gone.look_up([(record.instance_id, record.epoch)])
        if record.group_id in self.lost:
            return []
        return [each for each in samples if each.row.uid not in entry.buffer.uids]

    def _is_to_close(self, buffer: RunBuffer, record: GroupRow) -> bool:
        """Whether the group is open, or never existed, and reading will not close it."""
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
        """Read samples with their bodies; if one cannot be read, returns none, and a member's group is lost."""
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
        """Mark a group as lost if its recording lacks samples, because a damaged journal has set them aside."""
        if (num_there := sum(map(_is_rollout, samples))) < record.num_samples:
            self.lose(record, f"only {num_there} of its {record.num_samples} samples are recorded")

    def lose(self, record: GroupRow, why: str) -> None:
        """Record that a group cannot be replayed."""
        named = (record.group_id, record.instance_id, record.epoch)
        logger.warning("group %s (%r, epoch %d) is not replayed: %s", *named, why)
        self.lost[record.group_id] = why

    # --- writing

    async def _put_members(
        self,
        buffer: RunBuffer,
        record: GroupRow,
        recorded: Sequence[Recorded],
        rest: Sequence[Sequence[StoredSample]],
        fed: Fed,
    ) -> None:
        """Write what was read, then read and write the rest. Under the lock, so that no reader sees a part of it."""
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
        """Write a single sample; False if its body cannot be read."""
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
            # When the trainer had which weights is no longer known.
            await entry.group_judge.evaluate()
            if group.state in (GroupState.OPEN, GroupState.READY):
                buffer.move(group, GroupState.DISCARDED, DiscardReason.STALE, "as in the recording")
        else:
            await entry.deadlines.close_short(group, was_salvaged=record.is_salvaged)
        fed.stored = buffer.record(group.row)


def _is_rollout(sample: StoredSample) -> bool:
    return sample.row.outcome == "member" and not sample.row.fork


def stretches_of_bodies(samples: Sequence[StoredSample]) -> Iterator[Sequence[StoredSample]]:
    """Split ``samples`` into parts whose bodies fit into memory together: up to ``CHUNK_BYTES``."""
    return (part for part, _ in stretches(samples, lambda sample: sample.location.length, CHUNK_BYTES))


def _as_then(sample: SampleRow, groups: Groups, _sample: Incoming, now_s: float) -> admission.Placement:
    """Place a late or surplus sample as recorded, because its time of arrival decided that."""
    group = groups.by_id.get(sample.group_id) or SampleGroup(groups.new_row(sample.instance_id, sample.epoch, now_s))
    return admission.Placement(group, sample.slot, sample.outcome)
