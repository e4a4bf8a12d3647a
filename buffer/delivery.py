"""Handing groups to a trainer: which ones, as a lease that is acked or given back."""

import logging
import math
import secrets
from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from forebay.buffer.choosing import Choice, Chooser, ReadRequest
from forebay.buffer.groups import Group
from forebay.buffer.meta import MetaWindow
from forebay.buffer.pipeline import Pipeline, Staged, splice
from forebay.buffer.resume import batch_number
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.rows import GroupRow, Location, RunRow
from forebay.core.errors import RunEnded, StorageFailed
from forebay.core.group import DiscardReason, GroupState
from forebay.core.sample import Parts
from forebay.core.signal import Patience

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """A lease: groups on their way to a trainer."""

    batch_id: str
    groups: list[Group]
    reported: list[Group]
    """Groups that ended undelivered, and that this batch's ``finished_groups`` tell of."""
    window: MetaWindow
    staged: list[Staged]
    """What goes out of each group."""
    rows: list[Parts] = field(default_factory=list)
    """The encoded samples, in order."""
    meta_info: dict[str, Any] = field(default_factory=dict)


class Delivery:
    """Leases one run's groups."""

    def __init__(self, buffer: RunBuffer, pipeline: Pipeline) -> None:
        self._buffer = buffer
        self._pipeline = pipeline
        self.leases: dict[str, Batch] = {}
        self._acked: dict[str, Batch] = {}
        """Batches that have arrived, until the disk knows."""
        self._last_number = 0

    async def read(self, request: ReadRequest, wait_s: float = 0.0) -> Batch | None:
        """Lease a batch, waiting up to ``wait_s`` for it; None if it cannot be satisfied, and then nothing is taken.

        Raises ``RunEnded`` when nothing will ever come, ``StorageFailed`` when the lease cannot be written down.
        """
        patience = Patience(wait_s)
        while True:
            buffer = self._buffer
            async with buffer.lock:
                buffer.check_storage()
                num_news = buffer.news.count
                batch = await self._lease(request)
            if batch is not None:
                return await self._filled(batch)
            if buffer.is_exhausted:
                run = buffer.run
                raise RunEnded(run.run_id, run.reason.partition("\n")[0] or run.state.value)
            if patience.left_s <= 0 or (num_news == buffer.news.count and not await patience.wait(buffer.news)):
                return None

    def meta_info(self) -> dict[str, Any]:
        """The meta info of a reply without data: nothing is consumed by it."""
        return {**self._buffer.window.meta_info(), "finished_groups": []}

    # --- choosing

    async def _lease(self, request: ReadRequest) -> Batch | None:
        chosen = await self._choose_current(request)
        if not chosen:
            return None
        buffer = self._buffer
        reported = list(buffer.groups.unreported.values())
        groups, staged = [choice.group for choice in chosen], [choice.staged for choice in chosen]
        batch = Batch(self._new_batch_id(), groups, reported, buffer.window, staged)
        self._tell_cuts(chosen)
        buffer.window = buffer.new_window()
        for group in batch.groups:
            if group.state is GroupState.OPEN:
                buffer.move(group, GroupState.READY)
            group.row.batch_id, group.row.is_reported = batch.batch_id, True
            group.row.num_deliveries += 1
            buffer.groups.move(group, GroupState.LEASED, buffer.active.now_s())
        for group in reported:
            group.row.batch_id, group.row.is_reported = batch.batch_id, True
        buffer.groups.unreported.clear()
        self.leases[batch.batch_id] = batch
        return batch

    def _new_batch_id(self) -> str:
        self._last_number += 1
        return f"batch-{self._last_number:06d}-{secrets.token_hex(4)}"

    async def _choose_current(self, request: ReadRequest) -> list[Choice]:
        """Groups that satisfy the request, none of which got a sample while others were asked about."""
        while True:
            await self._pipeline.evaluate()
            if not self._may_suffice(request):
                return []
            chosen = await self._choose(request)
            if all(choice.is_current for choice in chosen):
                return chosen
            self._buffer.groups.put_back(c.group for c in chosen if c.group.state is GroupState.READY)

    def _may_suffice(self, request: ReadRequest) -> bool:
        """Whether there are groups enough to look at them: a reader that waits is woken by every sample."""
        groups, run = self._buffer.groups, self._buffer.run
        num_needed = request.num_groups or 1
        if request.is_slime and request.batch_size is not None:
            num_needed = math.ceil(request.batch_size / run.settings.group_size)
        return run.has_ended or groups.states[GroupState.READY] + len(groups.short_valid) >= num_needed

    async def _choose(self, request: ReadRequest) -> list[Choice]:
        """Groups that satisfy the request; none at all if that is not possible."""
        chooser = Chooser(self._buffer, request)
        seen: list[Group] = []
        try:
            await self._consider_all(chooser, seen)
            if not chooser.is_satisfied:
                chooser.chosen.clear()
        except BaseException:  # also a reader that goes away
            chooser.chosen.clear()
            raise
        finally:
            taken = {choice.group.group_id for choice in chooser.chosen}
            left = [group for group in seen if group.state is GroupState.READY and group.group_id not in taken]
            self._buffer.groups.put_back(left)
        return chooser.chosen

    async def _consider_all(self, chooser: Chooser, seen: list[Group]) -> None:
        """Full groups, oldest first, then short ones that are valid. ``seen`` gets those that left the queue."""
        for group in self._buffer.groups.take_ready():
            seen.append(group)
            await self._consider(chooser, group)
            if chooser.is_done:
                return
        if not chooser.is_satisfied:
            for group in list(self._buffer.groups.short_valid.values()):
                await self._consider(chooser, group)
                if chooser.is_done:
                    return

    async def _consider(self, chooser: Chooser, group: Group) -> None:
        if not chooser.may_take(group):
            return
        staged = await self._pipeline.stage(group)
        if staged is None:
            return
        if not chooser.request.is_slime:
            chooser.take(Choice(group, staged, staged))
        elif self._fits_slime(group, staged):
            size = self._buffer.run.settings.group_size
            chooser.take(Choice(group, Staged(staged.rows[:size], staged.samples), staged))

    def _fits_slime(self, group: Group, staged: Staged) -> bool:
        """Whether a group has rows enough; a closed one that has not is discarded. slime regroups by exact size."""
        size = self._buffer.run.settings.group_size
        if len(staged.rows) < size:
            if group.state is GroupState.READY:
                detail = f"{len(staged.rows)} rows were left of {size}"
                logger.warning("group %s (%r) discarded as incomplete: %s", group.group_id, group.instance_id, detail)
                self._buffer.move(group, GroupState.DISCARDED, DiscardReason.INCOMPLETE, detail)
            return False
        return True

    def _tell_cuts(self, chosen: Sequence[Choice]) -> None:
        for choice in chosen:
            num_cut = len(choice.whole.rows) - len(choice.staged.rows)
            if num_cut:
                self._buffer.counts["rows_cut"] += num_cut
                logger.warning("group %s: %d surplus rows were cut", choice.group.group_id, num_cut)

    # --- sending

    async def _filled(self, batch: Batch) -> Batch | None:
        """Write the lease down and fetch its rows; on failure or cancellation it is given back.

        None if the run was resumed meanwhile, and its groups are no longer this reader's.
        """
        buffer = self._buffer
        finished = [group.instance_id for group in (*batch.groups, *batch.reported)]
        try:
            stored = buffer.record(*(group.row for group in (*batch.groups, *batch.reported)))
            batch.rows = await self._rows(batch.staged)
            batch.meta_info = {**await self._pipeline.meta_info(batch.window), "finished_groups": finished}
            await stored
        except BaseException as error:  # also a reader that goes away: its groups must not stay leased
            self.release(batch.batch_id)
            if isinstance(error, StorageFailed) and not self._buffer.has_failed:
                await self._discard_unreadable(batch)
            raise
        return batch if batch.batch_id in self.leases else None

    async def _discard_unreadable(self, batch: Batch) -> None:
        """Find the groups of a released batch whose bodies are damaged, so that the next read gets past them."""
        for group, staged in zip(batch.groups, batch.staged, strict=True):
            try:
                await self._rows([staged])
            except StorageFailed as error:
                self._pipeline.discard_unreadable(group, error)

    async def _rows(self, staged: Sequence[Staged]) -> list[Parts]:
        """The encoded rows of groups; all bodies are fetched at once."""
        bodies = iter(await self._buffer.bodies([sample for each in staged for sample in each.needed]))
        return [row for each in staged for row in splice(each, list(islice(bodies, len(each.needed))))]

    def ack(self, batch_id: str) -> None:
        """The batch has arrived; its groups are done. An unknown id is ignored: it was acked or released before."""
        batch = self.leases.pop(batch_id, None)
        if batch is None:
            return
        self._write_ack(batch)
        buffer = self._buffer
        num_groups, num_rows = len(batch.groups), len(batch.rows)
        buffer.counts["rows_delivered"] += num_rows
        buffer.last_progress_s, buffer.is_stalled = buffer.active.now_s(), False
        told = {"run_id": buffer.run.run_id, "batch_id": batch_id, "num_groups": num_groups, "num_rows": num_rows}
        buffer.hooks.notify("batch_delivered", **told)
        buffer.news.notify()

    def _write_ack(self, batch: Batch) -> None:
        buffer = self._buffer
        for group in batch.groups:
            buffer.groups.move(group, GroupState.ACKED, buffer.active.now_s())
        rows: list[GroupRow | RunRow] = [group.row for group in batch.groups]
        if not buffer.run.has_delivered:
            buffer.run.has_delivered = True
            rows.append(buffer.run_row())
        self._acked[batch.batch_id] = batch

        def when_stored(stored: "Future[Location | None]") -> None:
            if not stored.cancelled() and stored.exception() is None:
                self._acked.pop(batch.batch_id, None)

        buffer.record(*rows).add_done_callback(when_stored)

    def release(self, batch_id: str) -> None:
        """The batch has not arrived: its groups are ready again, and what it reported will be reported again."""
        batch = self.leases.pop(batch_id, None)
        if batch is None:
            return
        buffer = self._buffer
        for group in batch.groups:
            group.row.is_reported, group.row.batch_id = False, ""
            buffer.groups.move(group, GroupState.READY, buffer.active.now_s())
        for group in batch.reported:
            group.row.is_reported, group.row.batch_id = False, ""
            buffer.groups.unreported[group.group_id] = group
        buffer.window.merge_before(batch.window)
        buffer.record(*(group.row for group in (*batch.groups, *batch.reported)))
        buffer.news.notify()

    def drop_leases(self) -> None:
        """Forget who has what: the run begins anew, and decides about the groups itself."""
        for batch in self.leases.values():
            self._buffer.window.merge_before(batch.window)
        self.leases.clear()

    # --- after loading

    @property
    def held_batches(self) -> set[str]:
        """Batches of which memory knows more than the disk may: leased, or arrived and not yet written down."""
        return {*self.leases, *self._acked}

    def resume_with(self, buffer: RunBuffer, pipeline: Pipeline) -> None:
        """Go on with what was loaded. What is on its way to a trainer stays leased, and what arrived is acked."""
        self._buffer, self._pipeline = buffer, pipeline
        numbers = (batch_number(group.row.batch_id) for group in buffer.groups.by_id.values())
        self._last_number = max(self._last_number, *numbers, 0)
        leases, acked = self.leases, self._acked
        self.leases, self._acked = self._still_leased(leases), {}
        for batch in self._still_leased(acked).values():
            self._write_ack(batch)

    def _still_leased(self, batches: dict[str, Batch]) -> dict[str, Batch]:
        """Those whose lease the disk knows, with the groups that were loaded."""
        by_id, known = self._buffer.groups.by_id, {}
        for batch_id, batch in batches.items():
            groups = [by_id[group.group_id] for group in batch.groups if group.group_id in by_id]
            if groups and all(g.state is GroupState.LEASED and g.row.batch_id == batch_id for g in groups):
                batch.groups, batch.reported = groups, [by_id[group.group_id] for group in batch.reported]
                known[batch_id] = batch
        return known
