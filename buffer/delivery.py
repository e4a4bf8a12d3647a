"""Handing groups to a trainer: which ones, as a lease that is acked or given back."""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from forebay.buffer.groups import Group
from forebay.buffer.meta import MetaWindow
from forebay.buffer.pipeline import Pipeline, Staged, splice
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.errors import RunEnded
from forebay.core.group import DiscardReason, GroupState
from forebay.core.ids import InstanceId
from forebay.core.sample import Parts
from forebay.core.signal import Patience

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a trainer asks for. Without a size: everything that is ready, within the run's caps for legacy reads."""

    num_groups: int | None = None
    batch_size: int | None = None
    """Rows, counted after the hooks; whole groups go until there are at least so many."""
    is_slime: bool = False
    """Each group goes out with exactly ``group_size`` rows."""

    @property
    def has_size(self) -> bool:
        return self.num_groups is not None or self.batch_size is not None


@dataclass(slots=True)
class Batch:
    """A lease: groups on their way to a trainer."""

    batch_id: str
    groups: list[Group]
    reported: list[Group]
    """Groups that ended undelivered, and that this batch's ``finished_groups`` tell of."""
    window: MetaWindow
    rows: list[Parts] = field(default_factory=list)
    """The encoded samples, in order."""
    meta_info: dict[str, Any] = field(default_factory=dict)


class Delivery:
    """Leases one run's groups."""

    def __init__(self, buffer: RunBuffer, pipeline: Pipeline) -> None:
        self._buffer = buffer
        self._pipeline = pipeline
        self.leases: dict[str, Batch] = {}

    async def read(self, request: ReadRequest, wait_s: float = 0.0) -> Batch | None:
        """Lease a batch, waiting up to ``wait_s`` for it; None if it cannot be satisfied, and then nothing is taken.

        Raises ``RunEnded`` when nothing will ever come, ``StorageFailed`` when the lease cannot be written down.
        """
        patience = Patience(wait_s)
        while True:
            async with self._buffer.lock:
                self._buffer.check_storage()
                batch = await self._lease(request)
            if batch is not None:
                return await self._filled(batch)
            if self._buffer.is_exhausted:
                run = self._buffer.run
                raise RunEnded(run.run_id, run.reason.partition("\n")[0] or run.state.value)
            if not await patience.wait(self._buffer.news):
                return None

    def meta_info(self) -> dict[str, Any]:
        """The meta info of a reply without data: nothing is consumed by it."""
        return {**self._buffer.window.meta_info(), "finished_groups": []}

    # --- choosing

    async def _lease(self, request: ReadRequest) -> Batch | None:
        await self._pipeline.evaluate()
        chosen = await self._choose(request)
        if not chosen:
            return None
        buffer = self._buffer
        reported = list(buffer.groups.unreported.values())
        batch = Batch(f"batch-{secrets.token_hex(8)}", [group for group, _ in chosen], reported, buffer.window)
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

    async def _choose(self, request: ReadRequest) -> list[tuple[Group, Staged]]:
        """Groups that satisfy the request; none at all if that is not possible."""
        chooser = _Chooser(self._buffer, request)
        left: list[Group] = []
        for group in self._buffer.groups.take_ready():
            taken = await self._consider(chooser, group)
            if not taken and group.state is GroupState.READY:
                left.append(group)
            if chooser.is_done:
                break
        if not chooser.is_satisfied:
            for group in list(self._buffer.groups.short_valid.values()):
                await self._consider(chooser, group)
                if chooser.is_done:
                    break
        if not chooser.is_satisfied:
            left += [group for group, _ in chooser.chosen if group.state is GroupState.READY]
            chooser.chosen.clear()
        self._buffer.groups.put_back(left)
        return chooser.chosen

    async def _consider(self, chooser: "_Chooser", group: Group) -> bool:
        if not chooser.may_take(group):
            return False
        staged = await self._pipeline.stage(group)
        if staged is None:
            return False
        if chooser.request.is_slime and not self._fits_slime(group, staged):
            return False
        return chooser.take(group, staged)

    def _fits_slime(self, group: Group, staged: Staged) -> bool:
        """Cut what is too much; discard a closed group that has too little. slime regroups by exact size."""
        size = self._buffer.run.settings.group_size
        if len(staged.rows) < size:
            if group.state is GroupState.READY:
                detail = f"{len(staged.rows)} rows were left of {size}"
                logger.warning("group %s (%r) discarded as incomplete: %s", group.group_id, group.instance_id, detail)
                self._buffer.move(group, GroupState.DISCARDED, DiscardReason.INCOMPLETE, detail)
            return False
        if len(staged.rows) > size:
            self._buffer.counts["rows_cut"] += len(staged.rows) - size
            logger.warning("group %s: %d surplus rows were cut", group.group_id, len(staged.rows) - size)
            staged.rows = staged.rows[:size]
        return True

    # --- sending

    async def _filled(self, batch: Batch) -> Batch:
        """Write the lease down and fetch its rows; on failure or cancellation it is given back."""
        buffer = self._buffer
        finished = [group.instance_id for group in (*batch.groups, *batch.reported)]
        try:
            stored = buffer.record(*(group.row for group in (*batch.groups, *batch.reported)))
            batch.rows = await self._rows(batch.groups)
            batch.meta_info = {**await self._pipeline.meta_info(batch.window), "finished_groups": finished}
            await stored
        except BaseException:  # also a reader that goes away: its groups must not stay leased
            self.release(batch.batch_id)
            raise
        return batch

    async def _rows(self, groups: Sequence[Group]) -> list[Parts]:
        """The encoded rows of ``groups``; all bodies are fetched at once."""
        staged = [group.staged for group in groups if isinstance(group.staged, Staged)]
        assert len(staged) == len(groups), "a group was leased without its rows"
        bodies = iter(await self._buffer.bodies([sample for each in staged for sample in each.needed]))
        return [row for each in staged for row in splice(each, list(islice(bodies, len(each.needed))))]

    def ack(self, batch_id: str) -> None:
        """The batch has arrived; its groups are done. An unknown id is ignored: it was acked or released before."""
        batch = self.leases.pop(batch_id, None)
        if batch is None:
            return
        buffer = self._buffer
        for group in batch.groups:
            buffer.groups.move(group, GroupState.ACKED, buffer.active.now_s())
        buffer.counts["rows_delivered"] += len(batch.rows)
        rows = [group.row for group in batch.groups]
        if buffer.run.has_delivered:
            buffer.record(*rows)
        else:
            buffer.run.has_delivered = True
            buffer.record(*rows, buffer.run_row())
        buffer.last_progress_s, buffer.is_stalled = buffer.active.now_s(), False
        told = {"run_id": buffer.run.run_id, "batch_id": batch_id, "num_groups": len(rows), "num_rows": len(batch.rows)}
        buffer.hooks.notify("batch_delivered", **told)
        buffer.news.notify()

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


class _Chooser:
    """Adds up groups until a request is satisfied."""

    def __init__(self, buffer: RunBuffer, request: ReadRequest) -> None:
        self.request = request
        self.chosen: list[tuple[Group, Staged]] = []
        self._settings = buffer.run.settings
        self._num_rows = 0
        self._num_bytes = 0
        self._instances: set[InstanceId] = set()
        self._is_capped = False

    @property
    def is_satisfied(self) -> bool:
        if self.request.num_groups is not None:
            return len(self.chosen) >= self.request.num_groups
        if self.request.batch_size is not None:
            return self._num_rows >= self.request.batch_size
        return bool(self.chosen)

    @property
    def is_done(self) -> bool:
        return self._is_capped or (self.request.has_size and self.is_satisfied)

    def may_take(self, group: Group) -> bool:
        """A read without a size holds at most one group of an instance: slime's client groups by instance id."""
        return self.request.has_size or group.instance_id not in self._instances

    def take(self, group: Group, staged: Staged) -> bool:
        """Add a group; False when the caps of a read without a size forbid it."""
        if not self.request.has_size and self.chosen and self._is_over(staged):
            self._is_capped = True
            return False
        self.chosen.append((group, staged))
        self._num_rows += len(staged.rows)
        self._num_bytes += staged.num_bytes
        self._instances.add(group.instance_id)
        return True

    def _is_over(self, staged: Staged) -> bool:
        limit = self._settings.legacy_read_max_groups
        if limit is not None and len(self.chosen) >= limit:
            return True
        return self._num_bytes + staged.num_bytes > self._settings.legacy_read_max_bytes
