"""Delivers groups to a trainer: chooses them and leases them as a batch."""

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
from forebay.core.backoff import Deadline
from forebay.core.errors import BatchAcked, BodyUnreadable, RunEnded, StorageFailed
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import BatchRow
from forebay.core.waiting import Signal

logger = logging.getLogger(__name__)

POLLS_ON = (
    "run %s (stream %r) has ended (%s) and has nothing left, and its client polls on: slime's own client does so"
    " for ever, whatever the reply. End its trainer. --fetch-trajectory-retry-times bounds its polls, and slime's"
    " --rollout-function-path forebay.client.slime.generate_rollout ends by itself"
)


@dataclass(slots=True)
class LeasedBatch:
    """A leased batch and the reply that carries it."""

    row: BatchRow
    groups: list[SampleGroup]
    reported: list[SampleGroup]
    """Groups that ended undelivered, and that this batch's ``finished_groups`` list."""
    window: MetaWindow
    staged: list[JudgedGroup]
    """The rows to send of each group."""
    stored: Stored
    """Completes when the lease is on the disk."""
    rows: ReplyRows = field(init=False)
    """The encoded samples, in order."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    chosen_at_s: float = field(default_factory=time.monotonic)
    """Monotonic seconds at which the hooks had answered."""

    @property
    def batch_id(self) -> str:
        return self.row.batch_id


@dataclass(slots=True)
class _Described:
    """The samples reserved for one reader's meta info, and the meta hook's answer about them."""

    buffer: RunBuffer
    window: MetaWindow
    meta_info: dict[str, Any] | None = None


class _Reader:
    """A client that waits for a batch."""

    def __init__(self, request: ReadRequest) -> None:
        self.request = request
        self.batch: LeasedBatch | None = None
        self.error: BatchAcked | None = None
        self.tried: tuple[Signal, int] | None = None
        """The change signal and its count at the last attempt to serve this request."""
        self.described: _Described | None = None
        """What the user's meta hook was asked about for this reader."""
        self.is_served = False
        """Whether an attempt to serve this request is in progress."""

    @property
    def is_waiting(self) -> bool:
        return self.batch is None and self.error is None

    def knows(self, news: Signal) -> bool:
        """Whether nothing has changed since the last attempt."""
        return self.tried == (news, news.count)


class Delivery:
    """Chooses groups for one run's readers and leases them."""

    def __init__(self, buffer: RunBuffer, group_judge: GroupJudge) -> None:
        self._buffer = buffer
        self._group_judge = group_judge
        self._selection = Selection(buffer, group_judge)
        self.readers: dict[_Reader, None] = {}
        """Waiting readers, in order of arrival."""
        self.leases = Leases(buffer)
        self._num_reads_since_end: Counter[int] = Counter()
        """Per start of the run (each may end): how often slime readers were answered that the run has ended."""

    async def read(self, request: ReadRequest, wait_s: float = 0.0) -> LeasedBatch | None:
        """Lease a batch, waiting up to ``wait_s`` for it; None, and no change, if the request cannot be satisfied.

        Readers are served in order of arrival. The caller reports afterwards whether the batch ``arrived`` or was
        ``abandoned``. Raises ``RunEnded`` when nothing will ever arrive, ``BatchAcked`` for the request of an
        acknowledged batch, ``StorageFailed`` when the lease cannot be stored.
        """
        batch = await self._obtain(request, wait_s)
        if batch is None:
            return None
        await self._fill(batch, has_rows=True)
        try:
            return batch if await self.confirm(batch) else None
        except BaseException:  # includes a cancelled reader: its groups must not stay leased
            self.leases.abandoned(batch.batch_id)
            raise

    async def prepare(self, request: ReadRequest, wait_s: float = 0.0) -> LeasedBatch | None:
        """Lease a batch like ``read``, but load no rows and do not wait for the disk.

        The last byte must not be sent before ``confirm``, which may wait for the disk. If a row cannot be read, the
        caller reports that the batch is ``broken``, and then ``abandoned``.
        """
        batch = await self._obtain(request, wait_s)
        if batch is not None:
            await self._fill(batch, has_rows=False)
        return batch

    async def _obtain(self, request: ReadRequest, wait_s: float) -> LeasedBatch | None:
        reader = _Reader(request)
        # A dictionary, because it keeps the order of arrival and removes a reader in O(1).
        self.readers[reader] = None
        try:
            await self._serve_within(reader, Deadline(wait_s))
        except BaseException:  # includes a reader cancelled just after another's attempt had served it
            if reader.batch is not None:
                self.leases.abandoned(reader.batch.batch_id)
            raise
        finally:
            del self.readers[reader]
            if not reader.is_served:  # otherwise the attempt in progress does so
                self._take_back(reader)
        return reader.batch

    async def _serve_within(self, reader: "_Reader", deadline: Deadline) -> None:
        while True:
            buffer = self._buffer
            async with buffer.lock:
                buffer.check_storage()
                # The holder of the lock serves all earlier readers too, so that none of them is overtaken.
                await self._serve_up_to(reader)
            # Another reader may have served this one while it waited for the lock.
            if reader.error is not None:
                raise reader.error
            if reader.batch is None and buffer.is_exhausted:
                raise self._end(reader.request)
            if reader.batch is not None or deadline.left_s <= 0:
                return
            # A change that arrived during the attempts is handled before waiting for the next.
            if reader.knows(buffer.news) and not await deadline.wait(buffer.news):
                return

    def _end(self, request: ReadRequest) -> RunEnded:
        """Make the error for a reader of an ended run; log once if slime's client keeps polling."""
        run = self._buffer.run
        reason = run.reason.partition("\n")[0] or run.state.value
        if request.is_slime:
            self._num_reads_since_end[run.num_starts] += 1
            if self._num_reads_since_end[run.num_starts] == 2:
                logger.warning(POLLS_ON, run.run_id, run.name, reason)
        return RunEnded(run.run_id, reason)

    async def _serve_up_to(self, last: "_Reader") -> None:
        """Try to serve every reader up to and including ``last`` from what is there now."""
        # A copy, because readers come and go while hooks run.
        for reader in list(self.readers):
            changed = self._buffer.news
            if reader.is_waiting and not reader.knows(changed):
                # Noted before the attempt, so that a change during it causes another attempt.
                reader.tried = (changed, changed.count)
                reader.is_served = True
                try:
                    batch = await self._lease(reader)
                except BatchAcked as error:
                    reader.error = error
                except BaseException:  # `last` was cancelled: the reader whose attempt that ended must retry
                    reader.tried = None
                    raise
                else:
                    self._give(reader, batch)
                finally:
                    reader.is_served = False
                    if reader not in self.readers:
                        self._take_back(reader)
            if reader is last:
                return

    def _give(self, reader: "_Reader", batch: LeasedBatch | None) -> None:
        if reader in self.readers:
            reader.batch = batch
        elif batch is not None:  # its reader disconnected meanwhile
            self.leases.abandoned(batch.batch_id)

    def meta_info(self) -> dict[str, Any]:
        """The meta info for a reply without data; consumes nothing."""
        return {**self._buffer.window.meta_info(), "finished_groups": []}

    # --- leasing

    async def _lease(self, reader: _Reader) -> LeasedBatch | None:
        request = reader.request
        # A client that lost its reply repeats the request id, and must not get a second batch.
        again = await self._leased_before(request.request_id) if request.request_id else None
        if again is not None:
            return again
        chosen = await self._selection.choose(request, lambda: self._describe(reader))
        return self._begin(reader, chosen) if chosen else None

    async def _describe(self, reader: _Reader) -> bool:
        """Ask the user's meta hook, once per read; return whether it was asked now.

        Samples that arrive from now on are in the next meta info: a read whose attempt failed does not ask again.
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
        """Count again the samples that were described for a reader that got nothing."""
        described, reader.described = reader.described, None
        # After a recovery the new buffer has loaded them.
        if described is not None and described.buffer is self._buffer:
            self._buffer.window.merge_before(described.window)

    def _take_window(self, reader: _Reader) -> tuple[MetaWindow, dict[str, Any]]:
        """The samples that a reader's batch covers, and their meta info."""
        buffer, described = self._buffer, reader.described
        if described is not None and described.buffer is buffer and described.meta_info is not None:
            reader.described = None
            return described.window, described.meta_info
        # Samples that arrive from now on are in the next meta info.
        window, buffer.window = buffer.window, buffer.new_window()
        return window, window.meta_info()

    async def _leased_before(self, request_id: str) -> LeasedBatch | None:
        """The batch that this request already got; None if it got none, or if the batch is no longer leased."""
        row = await self.leases.of_request(request_id)
        if row is not None and row.state is BatchState.ACKED:
            raise BatchAcked(row.batch_id)
        if row is None or row.state is not BatchState.LEASED:
            return None
        groups, staged = self.leases.groups_of(row), []
        for group in groups:
            made = await self._group_judge.stage(group)
            if made is None:  # a hook fails only now: the next read finds and skips the group
                self.leases.release_soon(row.batch_id)
                return None
            staged.append(made)
        lease = self.leases.held.get(row.batch_id)
        if lease is None:
            return None  # it was released meanwhile
        reported = [self._buffer.groups.by_id[key] for key in row.reported_ids]
        stored = self.leases.join(row)
        return LeasedBatch(row, groups, reported, lease.window, staged, stored, meta_info=row.meta_info)

    def _begin(self, reader: _Reader, chosen: Sequence[ChosenGroup]) -> LeasedBatch:
        buffer = self._buffer
        groups, reported = [choice.group for choice in chosen], list(buffer.groups.unreported.values())
        for group in groups:
            # An incomplete but valid group is closed by delivery; later samples are late.
            if group.state is GroupState.OPEN:
                buffer.move(group, GroupState.READY)
        window, described = self._take_window(reader)
        row = self._new_row(reader.request, chosen, reported)
        meta_info = self._with_groups(row, described, groups, reported)
        # Stored in the row, so that a repeated request gets the same; a self-acking batch is never resent.
        if not row.is_self_acking:
            row.meta_info = meta_info
        # The lease is being written to disk from here on, while the reply is made.
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
        """Make the rows while the lease is being written; on failure or cancellation the batch is released."""
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
        finally:  # also when the reader is cancelled: its groups must not stay leased
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

        Returns False if the batch is no longer leased, because the run was resumed or rewound meanwhile.
        """
        await batch.stored
        return batch.batch_id in self.leases.held

    async def broken(self, batch: LeasedBatch, error: StorageFailed) -> None:
        """Handle a reply that could not read all rows of its batch, or whose lease could not be stored.

        Groups with damaged bodies are discarded, so that the next read skips them. A reply whose batch is not leased
        any more changes nothing: its groups may be in another batch, and their bodies may have moved.
        """
        buffer, lease = self._buffer, self.leases.held.get(batch.batch_id)
        if lease is None:
            logger.info("an old reply with batch %s failed: %s", batch.batch_id, error)
            return
        logger.error("batch %s cannot be sent: %s", batch.batch_id, error)
        # After a failed write, rows in memory may point to offsets that were truncated.
        damaged = [] if buffer.has_failed else await self._damaged(batch)
        # Checked again: reading took a while, and the lease may have ended meanwhile.
        if damaged and self.leases.held.get(batch.batch_id) is lease and not buffer.has_failed:
            self.leases.release_soon(batch.batch_id)
            for group, damage in damaged:
                self._group_judge.discard_unreadable(group, damage)

    async def _damaged(self, batch: LeasedBatch) -> list[tuple[SampleGroup, BodyUnreadable]]:
        """The leased groups that cannot be read from where they are now, which may not be where the reply read."""
        damaged: list[tuple[SampleGroup, BodyUnreadable]] = []
        for group in self.leases.groups_of(batch.row):
            planned = group.staged.planned() if isinstance(group.staged, JudgedGroup) else []
            try:
                async for _ in ReplyRows(self._buffer, planned).chunks():
                    pass
            except BodyUnreadable as error:
                damaged.append((group, error))
            except StorageFailed:  # the machine lacks some resource, which does not mean that the body is damaged
                continue
        return damaged

    def _rows(self, batch: LeasedBatch) -> ReplyRows:
        """The batch's rows, still to be read, with stale groups marked."""
        stale = set(batch.row.stale_ids)
        finish = {group.group_id: staleness.marked if group.group_id in stale else None for group in batch.groups}
        pairs = zip(batch.groups, batch.staged, strict=True)
        planned = (staged.planned(finish[group.group_id]) for group, staged in pairs)
        return ReplyRows(self._buffer, list(chain.from_iterable(planned)))

    # --- after loading

    def resume_with(self, buffer: RunBuffer, group_judge: GroupJudge, windows: Mapping[str, MetaWindow]) -> None:
        """Continue with the loaded state: leased batches stay leased, and arrived self-acking ones are acknowledged."""
        self._buffer, self._group_judge = buffer, group_judge
        self._selection = Selection(buffer, group_judge)
        self.leases.resume_with(buffer, windows)
