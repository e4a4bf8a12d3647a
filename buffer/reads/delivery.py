"""Handing groups to a trainer: which ones, as a batch that is leased to it."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.leases.leases import Leases, Stored
from forebay.buffer.reads import staleness
from forebay.buffer.reads.judging import GroupJudge, JudgedGroup
from forebay.buffer.reads.reply_rows import ReplyRows
from forebay.buffer.reads.selection import ChosenGroup, ReadRequest, Selection
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.run_warnings import for_trainer
from forebay.core.errors import BatchAcked, BodyUnreadable, RunEnded, StorageFailed
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import BatchRow
from forebay.core.waiting import Deadline, Signal

logger = logging.getLogger(__name__)

POLLS_ON = (
    "run %s (stream %r) has ended (%s) and has nothing left, and its client polls on: slime's own does so for ever,"
    " whatever it is answered. End its trainer. --fetch-trajectory-retry-times bounds its polls, and slime's"
    " --rollout-function-path forebay.client.slime.generate_rollout ends by itself"
)


@dataclass(slots=True)
class LeasedBatch:
    """Groups on their way to a trainer, and the reply that carries them."""

    row: BatchRow
    groups: list[SampleGroup]
    reported: list[SampleGroup]
    """Groups that ended undelivered, and that this batch's ``finished_groups`` tell of."""
    window: MetaWindow
    staged: list[JudgedGroup]
    """What goes out of each group."""
    stored: Stored
    """Done when the lease is on the disk."""
    rows: ReplyRows = field(init=False)
    """The encoded samples, in order."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    chosen_at_s: float = field(default_factory=time.monotonic)
    """When the hooks had answered."""

    @property
    def batch_id(self) -> str:
        return self.row.batch_id


@dataclass(slots=True)
class _Described:
    """What arrived until a reader's groups were found, which is no other's from then on, and what a hook says of it."""

    buffer: RunBuffer
    window: MetaWindow
    meta_info: dict[str, Any] | None = None


class _Reader:
    """One who wants a batch."""

    def __init__(self, request: ReadRequest) -> None:
        self.request = request
        self.batch: LeasedBatch | None = None
        self.error: BatchAcked | None = None
        self.tried: tuple[Signal, int] | None = None
        """The news by which it was last tried to satisfy the request."""
        self.described: _Described | None = None
        """What the user's own meta hook was asked for it."""
        self.is_served = False
        """Whether somebody is just trying to satisfy the request."""

    @property
    def is_waiting(self) -> bool:
        return self.batch is None and self.error is None

    def knows(self, news: Signal) -> bool:
        """Whether nothing has happened since that try."""
        return self.tried == (news, news.count)


class Delivery:
    """Chooses groups for one run's readers, and leases them."""

    def __init__(self, buffer: RunBuffer, group_judge: GroupJudge) -> None:
        self._buffer = buffer
        self._group_judge = group_judge
        self._selection = Selection(buffer, group_judge)
        self._readers: dict[_Reader, None] = {}
        """Those who want a batch, in the order in which they came."""
        self.leases = Leases(buffer)
        self._num_reads_since_end: Counter[int] = Counter()
        """By start of the run, since each may end: how often readers of slime's routes were told of the end."""

    async def read(self, request: ReadRequest, wait_s: float = 0.0) -> LeasedBatch | None:
        """Lease a batch, waiting up to ``wait_s`` for it; None if it cannot be satisfied, and then nothing is taken.

        Of those who wait, whoever came first is asked first whether what is there satisfies it. The caller says
        afterwards whether the batch ``arrived`` or was ``abandoned``. Raises ``RunEnded`` when nothing will ever come,
        ``BatchAcked`` for the request of an acknowledged batch, ``StorageFailed`` when the lease cannot be stored.
        """
        batch = await self._obtain(request, wait_s)
        if batch is None:
            return None
        await self._fill(batch, has_rows=True)
        try:
            return batch if await self.confirm(batch) else None
        except BaseException:  # also a reader that goes away: its groups must not stay leased
            self.leases.abandoned(batch.batch_id)
            raise

    async def prepare(self, request: ReadRequest, wait_s: float = 0.0) -> LeasedBatch | None:
        """As ``read``, but for the rows, which are not loaded yet, and for the disk.

        The last byte must not go out before ``confirm``, which may wait for it. Whoever finds that a row cannot be read
        says that the batch is ``broken``, and then that it is ``abandoned``.
        """
        batch = await self._obtain(request, wait_s)
        if batch is not None:
            await self._fill(batch, has_rows=False)
        return batch

    async def _obtain(self, request: ReadRequest, wait_s: float) -> LeasedBatch | None:
        reader = _Reader(request)
        # A dictionary for its order: whoever came first is tried first, and leaves in O(1).
        self._readers[reader] = None
        try:
            await self._serve_within(reader, Deadline(wait_s))
        except BaseException:  # also a reader that goes away, just when another's turn had served it
            if reader.batch is not None:
                self.leases.abandoned(reader.batch.batch_id)
            raise
        finally:
            del self._readers[reader]
            if not reader.is_served:  # else whoever serves it does so
                self._take_back(reader)
        return reader.batch

    async def _serve_within(self, reader: "_Reader", deadline: Deadline) -> None:
        while True:
            buffer = self._buffer
            async with buffer.lock:
                buffer.check_storage()
                # Whoever has the lock serves all before it as well, so that none of them is overtaken.
                await self._serve_up_to(reader)
            # Another reader's turn may have served this one while it waited for the lock.
            if reader.error is not None:
                raise reader.error
            if reader.batch is None and buffer.is_exhausted:
                raise self._end(reader.request)
            if reader.batch is not None or deadline.left_s <= 0:
                return
            # News that came while others were tried is looked at before waiting for the next.
            if reader.knows(buffer.news) and not await deadline.wait(buffer.news):
                return

    def _end(self, request: ReadRequest) -> RunEnded:
        """What a reader is told when nothing will come; said to the log once, when slime's client does not hear it."""
        run = self._buffer.run
        reason = run.reason.partition("\n")[0] or run.state.value
        if request.is_slime:
            self._num_reads_since_end[run.num_starts] += 1
            if self._num_reads_since_end[run.num_starts] == 2:
                logger.warning(POLLS_ON, run.run_id, run.name, reason)
        return RunEnded(run.run_id, reason)

    async def _serve_up_to(self, last: "_Reader") -> None:
        """Try to satisfy everybody who came before ``last``, and then ``last``, by what is there now."""
        # A copy: readers come and go while hooks are asked.
        for reader in list(self._readers):
            news = self._buffer.news
            if reader.is_waiting and not reader.knows(news):
                # Noted before the try: what arrives during it makes it worth another one.
                reader.tried = (news, news.count)
                reader.is_served = True
                try:
                    batch = await self._lease(reader)
                except BatchAcked as error:
                    reader.error = error
                except BaseException:  # `last` goes away: the reader whose try that ended must try again
                    reader.tried = None
                    raise
                else:
                    self._give(reader, batch)
                finally:
                    reader.is_served = False
                    if reader not in self._readers:
                        self._take_back(reader)
            if reader is last:
                return

    def _give(self, reader: "_Reader", batch: LeasedBatch | None) -> None:
        if reader in self._readers:
            reader.batch = batch
        elif batch is not None:  # its reader went away meanwhile
            self.leases.abandoned(batch.batch_id)

    def meta_info(self) -> dict[str, Any]:
        """The meta info of a reply without data: nothing is consumed by it."""
        return {**self._buffer.window.meta_info(), "finished_groups": []}

    # --- leasing

    async def _lease(self, reader: _Reader) -> LeasedBatch | None:
        request = reader.request
        # A client that lost its reply asks again under the same id, and must not get a second batch.
        again = await self._leased_before(request.request_id) if request.request_id else None
        if again is not None:
            return again
        chosen = await self._selection.choose(request, lambda: self._describe(reader))
        return self._begin(reader, chosen) if chosen else None

    async def _describe(self, reader: _Reader) -> bool:
        """Ask the user's own meta hook, once for each read; whether it was asked now.

        What arrives from here on is in the next meta info: a read that was tried in vain does not ask again.
        """
        buffer = self._buffer
        if not buffer.hooks.in_host("meta_info"):
            return False
        if reader.described is None or reader.described.buffer is not buffer:
            window, buffer.window = buffer.window, buffer.new_window()
            reader.described = _Described(buffer, window)
        described = reader.described
        if described.meta_info is not None:
            return False
        described.meta_info = await self._group_judge.meta_info(described.window)
        return True

    def _take_back(self, reader: _Reader) -> None:
        """What was described for a reader that got nothing counts again."""
        described, reader.described = reader.described, None
        # After a recovery the new buffer has loaded it.
        if described is not None and described.buffer is self._buffer:
            self._buffer.window.merge_before(described.window)

    def _take_window(self, reader: _Reader) -> tuple[MetaWindow, dict[str, Any]]:
        """What a reader's batch is about, and the meta info of it."""
        buffer, described = self._buffer, reader.described
        if described is not None and described.buffer is buffer and described.meta_info is not None:
            reader.described = None
            return described.window, described.meta_info
        # What arrives from now on is in the next meta info.
        window, buffer.window = buffer.window, buffer.new_window()
        return window, window.meta_info()

    async def _leased_before(self, request_id: str) -> LeasedBatch | None:
        """The batch that this request got, once more; None if it got none, or has it no longer."""
        row = await self.leases.of_request(request_id)
        if row is not None and row.state is BatchState.ACKED:
            raise BatchAcked(row.batch_id)
        if row is None or row.state is not BatchState.LEASED:
            return None
        groups, staged = self.leases.groups_of(row), []
        for group in groups:
            made = await self._group_judge.stage(group)
            if made is None:  # a hook that fails only now: the next read finds it, and gets past it
                self.leases.release_soon(row.batch_id)
                return None
            staged.append(made)
        lease = self.leases.held.get(row.batch_id)
        if lease is None:
            return None  # it was given back meanwhile
        reported = [self._buffer.groups.by_id[key] for key in row.reported_ids]
        stored = self.leases.join(row)
        return LeasedBatch(row, groups, reported, lease.window, staged, stored, meta_info=row.meta_info)

    def _begin(self, reader: _Reader, chosen: Sequence[ChosenGroup]) -> LeasedBatch:
        buffer = self._buffer
        groups, reported = [choice.group for choice in chosen], list(buffer.groups.unreported.values())
        for group in groups:
            # Valid while still short: it is closed by going out, and later samples are late.
            if group.state is GroupState.OPEN:
                buffer.move(group, GroupState.READY)
        window, described = self._take_window(reader)
        row = self._new_row(reader.request, chosen, reported)
        meta_info = self._with_groups(row, described, groups, reported)
        # In the row, so that a repeated request gets the same; a self-acking batch is never sent a second time.
        if not row.is_self_acking:
            row.meta_info = meta_info
        # The lease is on its way to the disk from here on, while the reply is being made.
        staged = [choice.staged for choice in chosen]
        return LeasedBatch(row, groups, reported, window, staged, self.leases.begin(row, window), meta_info=meta_info)

    def _new_row(
        self, request: ReadRequest, chosen: Sequence[ChosenGroup], reported: Sequence[SampleGroup]
    ) -> BatchRow:
        number, batch_id = self._buffer.batches.new_id()
        return BatchRow(
            run_id=self._buffer.run.run_id,
            batch_id=batch_id,
            number=number,
            state=BatchState.LEASED,
            group_ids=[choice.group.group_id for choice in chosen],
            reported_ids=[group.group_id for group in reported],
            stale_ids=[choice.group.group_id for choice in chosen if choice.is_stale],
            num_rows=sum(len(choice.staged.rows) for choice in chosen),
            request_id=request.request_id,
            step=request.step,
            lease_s=0.0 if request.is_slime else request.lease_s,
            is_self_acking=request.is_slime,
        )

    # --- making the reply

    async def _fill(self, batch: LeasedBatch, *, has_rows: bool) -> None:
        """Make what is sent while the lease is written down; on failure or cancellation the batch is given back."""
        is_filled = False
        try:
            batch.rows = self._rows(batch)
            if has_rows:
                await batch.rows.load()
                await batch.rows.prove()
            is_filled = True
        except StorageFailed as error:
            await self.broken(batch, error)
            raise
        finally:  # also when the reader goes away: its groups must not stay leased
            if not is_filled:
                self.leases.abandoned(batch.batch_id)

    def _with_groups(
        self,
        row: BatchRow,
        meta_info: Mapping[str, Any],
        groups: Sequence[SampleGroup],
        reported: Sequence[SampleGroup],
    ) -> dict[str, Any]:
        finished = [group.instance_id for group in (*groups, *reported)]
        stale = staleness.distribution(groups, self._buffer.run.weight_version)
        warning = {} if row.is_self_acking else for_trainer(self._buffer.run)  # slime's replies have slime's fields
        return {**meta_info, "finished_groups": finished, **({} if stale is None else {"staleness": stale}), **warning}

    async def confirm(self, batch: LeasedBatch) -> bool:
        """Wait until the lease is on the disk. Raises ``StorageFailed``.

        False if the groups are no longer this reader's, because the run was resumed or rewound meanwhile.
        """
        await batch.stored
        return batch.batch_id in self.leases.held

    async def broken(self, batch: LeasedBatch, error: StorageFailed) -> None:
        """A reply could not read all rows of its batch, or the lease could not be stored.

        Groups whose bodies are damaged end, so that the next read gets past them. A reply that comes so late that the
        batch is not leased any more changes nothing: its groups are others' now, and their bodies may have moved.
        """
        buffer, lease = self._buffer, self.leases.held.get(batch.batch_id)
        if lease is None:
            logger.info("an old reply with batch %s ends: %s", batch.batch_id, error)
            return
        logger.error("batch %s cannot be sent: %s", batch.batch_id, error)
        # After a failed write the rows in memory may name places that are cut off again.
        damaged = [] if buffer.has_failed else await self._damaged(batch)
        # Checked again: reading took a while, and the groups may be others' by now.
        if damaged and self.leases.held.get(batch.batch_id) is lease and not buffer.has_failed:
            self.leases.release_soon(batch.batch_id)
            for group, damage in damaged:
                self._group_judge.discard_unreadable(group, damage)

    async def _damaged(self, batch: LeasedBatch) -> list[tuple[SampleGroup, BodyUnreadable]]:
        """The groups of a leased batch that cannot be read where they are now, which the reply need not know."""
        damaged: list[tuple[SampleGroup, BodyUnreadable]] = []
        for group in self.leases.groups_of(batch.row):
            planned = group.staged.planned() if isinstance(group.staged, JudgedGroup) else []
            try:
                async for _ in ReplyRows(self._buffer, planned).chunks():
                    pass
            except BodyUnreadable as error:
                damaged.append((group, error))
            except StorageFailed:  # the machine is short of something: that says nothing about the body
                continue
        return damaged

    def _rows(self, batch: LeasedBatch) -> ReplyRows:
        """The batch's rows, to be read; with a mark in those of stale groups."""
        stale = set(batch.row.stale_ids)
        finish = {group.group_id: staleness.marked if group.group_id in stale else None for group in batch.groups}
        pairs = zip(batch.groups, batch.staged, strict=True)
        planned = (staged.planned(finish[group.group_id]) for group, staged in pairs)
        return ReplyRows(self._buffer, list(chain.from_iterable(planned)))

    # --- after loading

    def resume_with(self, buffer: RunBuffer, group_judge: GroupJudge, windows: Mapping[str, MetaWindow]) -> None:
        """Go on with what was loaded. What is with a trainer stays leased, and what arrived is acknowledged."""
        self._buffer, self._group_judge = buffer, group_judge
        self._selection = Selection(buffer, group_judge)
        self.leases.resume_with(buffer, windows)
