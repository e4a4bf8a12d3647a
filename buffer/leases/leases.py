"""Leases: which reader has which batch, until when, and how the lease ends."""

import math
from asyncio import Future
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.errors import BatchAcked, LeaseLost
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import BatchRow, Location, Row

Stored = Future[Location | None]

SELF_ACKING_IDLE_S = 600.0
"""Maximum idle seconds of a reply that needs no acknowledgement. It has no lease, so this limits it instead."""
LEAST_IDLE_S = 1.0
"""Minimum idle seconds allowed for any reply: a lease may be shorter than the network delay."""


@dataclass(slots=True)
class Lease:
    """A leased batch's state in memory."""

    row: BatchRow
    window: MetaWindow
    """Samples covered by its meta info; they count again if the batch is released."""
    until_s: float = math.inf
    """Monotonic seconds at which it expires, unless its first reply is still being sent."""
    num_readers: int = 0
    """Replies in progress that carry it; its time does not run during them."""
    has_arrived: bool = False
    """Whether one of its replies was sent completely."""


class Leases:
    """One run's leases. Every change happens in memory at once, and is one append."""

    def __init__(self, buffer: RunBuffer) -> None:
        self.buffer = buffer
        self.held: dict[str, Lease] = {}
        self._unwritten: dict[str, BatchState] = {}
        """Batches that ended without waiting for the disk, until the disk has it."""

    def groups_of(self, row: BatchRow) -> list[SampleGroup]:
        """The groups of a batch, in the batch's order."""
        return [self.buffer.groups.by_id[key] for key in row.group_ids]

    # --- going out

    def begin(self, row: BatchRow, window: MetaWindow) -> Stored:
        """Lease a batch of ready groups to the reader whose reply is being made."""
        self.buffer.batches.add(row)
        lease = self.held[row.batch_id] = Lease(row, window, num_readers=1)
        self._renew(lease)
        return self.buffer.record(*self._claim(row), row)

    def join(self, row: BatchRow) -> Stored:
        """Restart the lease of a batch that another reply starts to carry."""
        lease = self.held[row.batch_id]
        # The earlier reply may hang on a dead connection, so both may carry the batch.
        lease.num_readers += 1
        self._renew(lease)
        return self.buffer.record(row)

    def _claim(self, row: BatchRow, state: GroupState = GroupState.LEASED) -> list[Row]:
        """Assign ready groups, and groups that no other batch reports, to the batch."""
        groups, changed = self.buffer.groups, self.groups_of(row)
        for group in changed:
            # A late ack claims its groups without delivering them again.
            group.row.num_deliveries += state is GroupState.LEASED
            group.row.weight_version = self.buffer.run.weight_version
            group.row.batch_id = row.batch_id
            groups.move(group, state, self.buffer.active.now_s())
        reported = [groups.unreported.pop(key) for key in row.reported_ids if key in groups.unreported]
        for group in (*changed, *reported):
            group.row.batch_id, group.row.is_reported = row.batch_id, True
        return [group.row for group in (*changed, *reported)]

    def _renew(self, lease: Lease) -> None:
        lease.row.leased_at_s = self.buffer.wall()
        lease.until_s = math.inf if lease.row.is_self_acking else self.buffer.monotonic() + lease.row.lease_s

    def arrived(self, batch_id: str) -> None:
        """Start the lease's time, or finish a self-acking batch: the client received the last byte."""
        lease = self.held.get(batch_id)
        if lease is None:
            return  # it was revoked, or acknowledged over another connection
        lease.num_readers = 0  # another reply, perhaps on a dead connection, must not keep it from expiring
        lease.has_arrived = True
        if lease.row.is_self_acking:
            self.ack_soon(batch_id)
        else:
            # A lease starts after the reply's last byte, not its first.
            self._renew(lease)

    def abandoned(self, batch_id: str) -> None:
        """Make a batch ready again after its client disconnected early, unless another reply carries it."""
        lease = self.held.get(batch_id)
        if lease is None:
            return
        lease.num_readers = max(0, lease.num_readers - 1)
        # A batch that arrived before belongs to the trainer, even if a repeated reply fails.
        if not lease.num_readers and not lease.has_arrived:
            self.release_soon(batch_id)

    def patience_s(self, batch_id: str, idle_s: float) -> float:
        """For how many more seconds a reply that carries the batch may be idle, after ``idle_s``.

        A client that reads nothing looks like one that has died. It gets as long as it has for training on a batch:
        each read restarts the lease, which may also be extended. So slow readers are never cut off, and trainers that
        read between their steps have the time they asked for. Groups of a stopped trainer do not wait for ever. A
        batch that is no longer leased cannot be sent completely.
        """
        lease = self.held.get(batch_id)
        if lease is None:
            return 0.0
        if lease.row.is_self_acking:
            return SELF_ACKING_IDLE_S - idle_s
        return max(lease.row.lease_s - idle_s, lease.until_s - self.buffer.monotonic(), LEAST_IDLE_S - idle_s)

    # --- ending, without waiting for the disk

    def ack_soon(self, batch_id: str) -> None:
        """Acknowledge a batch. Ignores one that is not leased."""
        lease = self.held.get(batch_id)
        if lease is not None:
            self._note_unwritten(batch_id, BatchState.ACKED, self.buffer.record(*self.acknowledge(lease.row)))

    def release_soon(self, batch_id: str, *, may_be_known: bool = False) -> None:
        """Release a batch. Ignores one that is not leased."""
        lease = self.held.get(batch_id)
        if lease is not None:
            # Memory makes the groups ready before the disk does. After a crash in between, the batch is still leased.
            rows = self.give_back(lease, BatchState.RELEASED, may_be_known=may_be_known)
            self._note_unwritten(batch_id, BatchState.RELEASED, self.buffer.record(*rows))

    def _note_unwritten(self, batch_id: str, state: BatchState, stored: Stored) -> None:
        self._unwritten[batch_id] = state

        def when_done(stored: Stored) -> None:
            # After a failure the entry stays: `resume_with` repeats the change on what was loaded.
            if not stored.cancelled() and stored.exception() is None:
                self._unwritten.pop(batch_id, None)

        stored.add_done_callback(when_done)

    # --- requested by a trainer

    async def ack(self, batch_id: str) -> BatchRow:
        """Acknowledge a batch, even an expired one if its groups are still there.

        Raises ``BatchNotFound``, ``LeaseLost``, ``StorageFailed``.
        """
        async with self.steady([batch_id]) as [row]:
            self.check(row)
            await self.buffer.record(*self.acknowledge(row))
        return row

    async def release(self, batch_id: str) -> BatchRow:
        """Release a batch; releasing it twice is harmless. Raises ``BatchNotFound``, ``BatchAcked``."""
        async with self.steady([batch_id]) as [row]:
            if row.state is BatchState.ACKED:
                raise BatchAcked(batch_id)
            rows: Sequence[Row] = [row]
            if row.state is BatchState.LEASED:
                rows = self.give_back(self.held[batch_id], BatchState.RELEASED)
            elif row.state is BatchState.EXPIRED:
                row.state = BatchState.RELEASED
            await self.buffer.record(*rows)
        return row

    async def extend(self, batch_id: str, lease_s: float | None) -> BatchRow:
        """Restart a lease, even an expired one if its groups are still there, for ``lease_s`` seconds if given.

        Raises ``BatchNotFound``, ``BatchAcked``, ``LeaseLost``, ``StorageFailed``.
        """
        async with self.steady([batch_id]) as [row]:
            if row.state is BatchState.ACKED:
                raise BatchAcked(batch_id)
            self.check(row)
            rows: list[Row] = []
            if row.state is BatchState.EXPIRED:
                rows = self._claim(row)
                row.state = BatchState.LEASED
                # Its window was returned when it expired, and counts for another batch now.
                self.held[batch_id] = Lease(row, self.buffer.new_window(), has_arrived=True)
            is_stored = not rows and lease_s in (None, row.lease_s)
            row.lease_s = row.lease_s if lease_s is None else lease_s
            self._renew(self.held[batch_id])
            # A restart restarts every lease, so the disk need not know when this one last did.
            if not is_stored:
                await self.buffer.record(*rows, row)
        return row

    @asynccontextmanager
    async def steady(self, batch_ids: Iterable[str]) -> AsyncIterator[list[BatchRow]]:
        """These batches, without duplicates. If one has expired, no reader chooses groups inside the block.

        Raises ``BatchNotFound``, ``StorageFailed``.
        """
        buffer, batch_ids = self.buffer, list(dict.fromkeys(batch_ids))
        buffer.check_storage()
        known = [row for row in map(buffer.batches.by_id.get, batch_ids) if row is not None]
        # Groups of an expired batch are ready, so a reader may be about to choose them.
        if len(known) == len(batch_ids) and not any(row.state is BatchState.EXPIRED for row in known):
            yield known
            return
        async with buffer.lock, buffer.gone.these_batches(batch_ids):
            rows = [buffer.batches.get(batch_id) for batch_id in batch_ids]
            late = [row for row in rows if row.state is BatchState.EXPIRED]
            async with buffer.gone.these([key for row in late for key in (*row.group_ids, *row.reported_ids)]):
                # The storage may have failed while this waited for the lock.
                buffer.check_storage()
                yield rows

    async def of_request(self, request_id: str) -> BatchRow | None:
        """The newest batch handed out for a reader's request. Raises ``StorageFailed``."""
        buffer = self.buffer
        batch_id = buffer.batches.of_request(request_id)
        if batch_id is None:
            return None
        async with buffer.gone.these_batches([batch_id]):
            return buffer.batches.by_id.get(batch_id)

    def check(self, row: BatchRow) -> None:
        """Raise ``LeaseLost`` unless the batch is acknowledged or still can be."""
        is_there = row.state in (BatchState.LEASED, BatchState.ACKED)
        is_late = row.state is BatchState.EXPIRED
        if not is_there and not (is_late and all(g.state is GroupState.READY for g in self.groups_of(row))):
            raise LeaseLost(row.batch_id, self._loss(row))

    def _loss(self, row: BatchRow) -> str:
        if row.state is BatchState.RELEASED:
            return "it was released"
        if row.state is BatchState.REVOKED:
            return row.reason
        group = next(group for group in self.groups_of(row) if group.state is not GroupState.READY)
        if group.state is GroupState.DISCARDED:
            return f"its lease expired, and its group {group.group_id} was discarded: {group.row.reason}"
        other = self.buffer.batches.by_id.get(group.row.batch_id)
        if other is None:
            return "its lease expired, and a resumed trainer has listed its groups"
        step = "" if other.step is None else f" (step {other.step})"
        return f"its lease expired, and batch {other.batch_id!r}{step} has its groups now"

    # --- changes in memory; each returns the changed rows

    def acknowledge(self, row: BatchRow) -> list[Row]:
        """Acknowledge a batch that ``check`` allows."""
        buffer, changed = self.buffer, []
        if row.state is BatchState.ACKED:
            return [row]
        if row.state is BatchState.EXPIRED:
            # Late, but no other reader got the groups, so the trainer has trained on them.
            changed = self._claim(row, GroupState.ACKED)
        for group in self.groups_of(row):
            # Groups claimed just now are acknowledged already.
            if group.state is GroupState.LEASED:
                buffer.groups.move(group, GroupState.ACKED, buffer.active.now_s())
                changed.append(group.row)
        # The groups that it reported are done too.
        buffer.groups.done += row.reported_ids
        self.held.pop(row.batch_id, None)
        # The batch is never sent again, and this would be most of its stored size.
        row.state, row.meta_info = BatchState.ACKED, {}
        self._note_delivered(row)
        if not buffer.run.has_delivered or buffer.run.has_ended:  # nothing else stores the counts of an ended run
            buffer.run.has_delivered = True
            # Another start with an equal payload must not return a run that has delivered something.
            changed += buffer.run_rows()
        return [*changed, row]

    def _note_delivered(self, row: BatchRow) -> None:
        buffer = self.buffer
        buffer.counts["rows_delivered"] += row.num_rows
        buffer.last_progress_s, buffer.is_stalled = buffer.active.now_s(), False
        buffer.hooks.notify(
            "batch_delivered",
            run_id=buffer.run.run_id,
            batch_id=row.batch_id,
            num_groups=len(row.group_ids),
            num_rows=row.num_rows,
        )
        buffer.news.notify()

    def give_back(self, lease: Lease, state: BatchState, *, may_be_known: bool = False) -> list[Row]:
        """End a lease and make its groups ready; ``may_be_known`` if the trainer may still have received them."""
        lease.row.state = state
        return [*self.take_back(lease.row, may_be_known=may_be_known), lease.row]

    def take_back(
        self, row: BatchRow, lost: Mapping[str, list[Sample]] | None = None, *, may_be_known: bool = False
    ) -> list[Row]:
        """Make a batch's groups ready, and unreport what it reported.

        ``lost`` holds the samples of acknowledged groups.
        """
        buffer, groups = self.buffer, self.buffer.groups
        lease = self.held.pop(row.batch_id, None)
        if lease is not None:
            buffer.window.merge_before(lease.window)
        # An expired batch may have lost groups to another batch, which keeps them.
        own = [group for group in self.groups_of(row) if group.row.batch_id == row.batch_id]
        listed = [groups.by_id[key] for key in row.reported_ids]
        reported = [group for group in listed if group.row.batch_id == row.batch_id]
        for group in own:
            if lost is not None and group.state is GroupState.ACKED:
                self._revive(group, lost[group.group_id])
            groups.move(group, GroupState.READY, buffer.active.now_s())
        for group in reported:
            groups.unreported[group.group_id] = group
        for group in (*own, *reported):
            group.row.batch_id, group.row.is_reported = "", False
            group.row.may_be_known |= may_be_known
        buffer.news.notify()
        return [group.row for group in (*own, *reported)]

    def _revive(self, group: SampleGroup, samples: list[Sample]) -> None:
        self.buffer.groups.revive(group, samples)
        # Undelivered again, they count in the next meta info.
        for sample in group.samples:
            self.buffer.window.add(group, sample)

    def forget(self) -> None:
        """Drop every lease: the caller decides about their groups."""
        for lease in self.held.values():
            self.buffer.window.merge_before(lease.window)
        self.held.clear()

    # --- after loading

    def resume_with(self, buffer: RunBuffer, windows: Mapping[str, MetaWindow]) -> None:
        """Continue with the loaded state: the disk knows which batches are leased, memory knows what changed since.

        A lease whose reader is unknown restarts, except a self-acking one: its reply was cut off. ``windows``
        hold the samples of the leased batches.
        """
        self.buffer = buffer
        self._free_strays()
        old, self.held = self.held, {}
        # The disk may lack the end of a batch that memory has acknowledged; that acknowledgement still counts.
        unwritten, self._unwritten = self._unwritten, {}
        for row in buffer.batches.in_state(BatchState.LEASED):
            lease = old.get(row.batch_id)
            self.held[row.batch_id] = lease or Lease(row, windows[row.batch_id], has_arrived=True)
            self.held[row.batch_id].row = row
            if lease is None:
                self._renew(self.held[row.batch_id])
            if unwritten.get(row.batch_id) is BatchState.ACKED:
                self.ack_soon(row.batch_id)
            # A restart cut off this self-acking reply, but the trainer may have received it completely.
            elif row.batch_id in unwritten or (row.is_self_acking and lease is None):
                self.release_soon(row.batch_id, may_be_known=row.batch_id not in unwritten)

    def _free_strays(self) -> None:
        """Make groups ready whose batch is not in the journal because its record is damaged."""
        leased = {row.batch_id for row in self.buffer.batches.in_state(BatchState.LEASED)}
        for group in self.buffer.groups.in_state(GroupState.LEASED):
            if group.row.batch_id not in leased:
                group.row.batch_id, group.row.is_reported, group.row.may_be_known = "", False, True
                self.buffer.move(group, GroupState.READY)
