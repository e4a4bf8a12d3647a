"""Groups and batches evicted from memory: which may be evicted, and how they are looked up.

A group is done once only a rewind or a resume can change it. Either it was acknowledged, or it was discarded and the
trainer has acknowledged the batch that reported it. Groups that are done are evicted, oldest first, when they have
more samples than are remembered; the store keeps them. So memory holds all uids

- of every group that is open, ready or leased,
- of the most recent done groups, up to ``remembered_samples`` samples,
- of every group that was looked up: a sample whose group is not in memory waits until the index has been queried,
  once per group.

Batches are evicted too, as ``batches.py`` describes, when they have more rows than that. A caller that names
an evicted batch has it looked up; one that needs many has all of them looked up.

For a writer without epochs, the buffer decides which group a sample belongs to. Then the newest groups of its
instance are looked up, once, whenever one of them is not in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from operator import attrgetter

from forebay.buffer.batches import IN_MEMORY, Batches
from forebay.buffer.groups.groups import Groups
from forebay.buffer.groups.known_uids import KnownUids
from forebay.buffer.store.abc import NEWEST_GROUPS, Store
from forebay.core.group import LIVE, BatchState, GroupState
from forebay.core.ids import InstanceId, group_id
from forebay.core.records.rows import BatchRow, FoundGroup, GroupRow
from forebay.core.run import Run

REMEMBERED_SAMPLES = 65_536

Place = tuple[InstanceId, int | None]
"""Where a sample belongs: its instance and, if given, its epoch."""


class EvictedRows:
    """Tracks which groups and batches of a run are in memory, and which only in the store."""

    def __init__(self, run: Run, groups: Groups, batches: Batches, store: Store, remembered_samples: int) -> None:
        self.uids = KnownUids()
        self.is_complete = True
        """Whether all groups of the run are in memory."""
        self._run, self._groups, self._batches, self._store = run, groups, batches, store
        self._remembered_samples = remembered_samples
        self.on_recall: Callable[[], None] = lambda: None
        """Called when something is loaded that must be evicted again."""
        self._whole: set[InstanceId] = set()
        """Instances whose newest groups are in memory, once not everything is."""
        self._wanted: dict[Place, None] = {}
        self._asking: asyncio.Task[None] | None = None
        self._num_forgotten = 0
        self.num_holders = 0
        """Number of holders; while there are any, nothing is evicted."""
        self._is_forgetting = False

    @property
    def remembered_samples(self) -> int:
        """How many samples of done groups stay in memory: 0 once the run has ended."""
        return 0 if self._run.has_ended else self._remembered_samples

    # --- finding them again

    def knows(self, instance_id: InstanceId, epoch: int | None) -> bool:
        """Whether memory alone can decide about a sample of this place."""
        if self.is_complete:
            return True
        if epoch is None:
            # Once the run has ended, a sample without an epoch is late for the first one, however old that is.
            is_first_known = not self._run.has_ended or self.uids.knows(group_id(instance_id, 0))
            return instance_id in self._whole and is_first_known
        return self.uids.knows(group_id(instance_id, epoch))

    async def look_up(self, places: Iterable[Place]) -> None:
        """Load what is stored of these places. Raises ``StorageFailed``.

        Callers that arrive during a query share the next one.
        """
        places = list(places)
        while missing := [place for place in places if not self.knows(*place)]:
            self._wanted |= dict.fromkeys(missing)
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            # Cancelling one caller must not take the answer from the others.
            await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            await self._answer()
        finally:
            # Not in a callback, which runs later: until then, a loop that awaits the finished task would never yield.
            self._asking = None

    async def _answer(self) -> None:
        wanted, self._wanted = self._wanted, {}
        keys = {
            group_id(instance, epoch or 0) for instance, epoch in wanted if epoch is not None or self._run.has_ended
        }
        instances = [instance for instance, epoch in wanted if epoch is None]
        for instance in instances:
            keys |= {g.group_id for g in self._groups.by_instance.get(instance, ()) if not self.uids.knows(g.group_id)}
        while True:
            num_forgotten = self._num_forgotten
            found = await self._store.find(self._run.run_id, list(keys), instances)
            # The index may not yet have contained what was evicted during the query.
            if num_forgotten == self._num_forgotten:
                break
        self.on_recall()
        for each in found:
            self._take(each)
        self._note_whole(instances)

    def _take(self, found: FoundGroup) -> None:
        if found.row is not None:
            self._groups.recall(found.row)
        self.uids.learn(found.group_id, found.uids)
        self.uids.mark_done(found.group_id)  # one that is not done is skipped at eviction

    def _note_whole(self, instances: Iterable[InstanceId]) -> None:
        # The caller may not have opened the group after all.
        if len(self._whole) > 2 * len(self._groups.by_instance) + 1024:
            self._whole = {instance for instance in self._whole if instance in self._groups.by_instance}
        self._whole.update(instances)

    @asynccontextmanager
    async def everything(self) -> AsyncIterator[None]:
        """Keep every group and batch of the run in memory inside the block. Raises ``StorageFailed``.

        For rare operations on all of them: a rewind, a resume, another start of the run's process.
        """
        with self.nothing_forgotten():
            if not self.is_complete:
                self._recall(await self._store.load_groups(self._run.run_id))
            if not self._batches.is_complete:
                self._recall_batches(await self._store.load_batches(self._run.run_id))
            yield

    @asynccontextmanager
    async def these(self, group_ids: Collection[str]) -> AsyncIterator[None]:
        """Keep these groups, if they exist, and their batches in memory inside the block.

        Raises ``StorageFailed``.
        """
        with self.nothing_forgotten():
            self._recall((await self.rows_of(group_ids)).values())
            known = self._groups.by_id
            holders = await self.batch_rows_of(known[key].row.batch_id for key in group_ids if key in known)
            self._recall_batches(holders.values())
            yield

    @asynccontextmanager
    async def these_batches(self, batch_ids: Iterable[str]) -> AsyncIterator[None]:
        """Keep these batches, if they exist, in memory inside the block. Raises ``StorageFailed``."""
        with self.nothing_forgotten():
            self._recall_batches((await self.batch_rows_of(batch_ids)).values())
            yield

    async def all_batches(self, *states: BatchState) -> list[BatchRow]:
        """Every batch of the run, or those in ``states``, oldest first; loads none into memory.

        Raises ``StorageFailed``.
        """
        stored: list[BatchRow] = []
        if not (self._batches.is_complete or (states and IN_MEMORY.issuperset(states))):
            with self.nothing_forgotten():  # a batch that changes and leaves meanwhile would be read in its old state
                stored = await self._store.load_batches(self._run.run_id)
        # Memory is ahead of the store.
        known = {row.batch_id: row for row in stored} | self._batches.by_id
        return sorted((row for row in known.values() if not states or row.state in states), key=attrgetter("number"))

    def _recall(self, rows: Iterable[GroupRow]) -> None:
        self.on_recall()
        for row in rows:
            if self._groups.recall(row):
                self.uids.mark_done(row.group_id)

    def _recall_batches(self, rows: Iterable[BatchRow]) -> None:
        self.on_recall()
        for row in rows:
            self._batches.recall(row)

    @contextmanager
    def nothing_forgotten(self) -> Iterator[None]:
        """Evict no group or batch inside the block."""
        self.num_holders += 1
        try:
            yield
        finally:
            self.num_holders -= 1

    async def rows_of(self, group_ids: Iterable[str]) -> dict[str, GroupRow]:
        """Rows of those groups that are not in memory. Raises ``StorageFailed``."""
        missing = [] if self.is_complete else [key for key in group_ids if key not in self._groups.by_id]
        found = await self._store.find(self._run.run_id, missing, has_uids=False) if missing else []
        return {each.group_id: each.row for each in found if each.row is not None}

    async def batch_rows_of(self, batch_ids: Iterable[str]) -> dict[str, BatchRow]:
        """Rows of those batches that are not in memory. Raises ``StorageFailed``."""
        known = self._batches
        missing = set() if known.is_complete else {key for key in batch_ids if key and key not in known.by_id}
        found = await self._store.find_batches(self._run.run_id, sorted(missing)) if missing else []
        return {row.batch_id: row for row in found}

    async def closed_since(self, after: int) -> list[GroupRow]:
        """Groups closed after number ``after``, in order of closing. Raises ``StorageFailed``."""
        closed = self._groups.closed
        numbers = range(after + 1, self._groups.num_closed + 1)
        if all(number in closed for number in numbers):
            return [closed[number].row for number in numbers]
        with self.nothing_forgotten():  # a group that closed and was evicted meanwhile would be missed permanently
            rows = {row.closed_seq: row for row in await self._store.closed_groups(self._run.run_id, after)}
        # Memory is ahead of the store, and has all groups that may change.
        rows |= {number: group.row for number, group in closed.items() if number > after}
        return [rows[number] for number in sorted(rows)]

    # --- evicting

    def is_done(self, key: str) -> bool:
        """Whether this group may be evicted, or already is."""
        group = self._groups.by_id.get(key)
        return group is None or self.may_go(group.row)

    def may_go(self, row: GroupRow) -> bool:
        """Whether the group with this row may be evicted."""
        if row.state in LIVE or row.surplus_due or (row.state is GroupState.DISCARDED and not row.is_reported):
            return False
        if self._run.counts_groups and row.closed_seq > self._run.step.num_closed:
            return False  # the current step counts it
        return self._batches.is_over(row.batch_id)

    async def forget(self) -> None:
        """Evict the oldest groups and batches that are done, if they exceed what is remembered.

        Raises ``StorageFailed``.
        """
        if not self.num_holders:
            self._batches.forget_oldest(self.remembered_samples)
        for key in self._groups.done:
            self.uids.mark_done(key)
        self._groups.done.clear()
        # Not for each single group, because the store must bring its index up to date for it.
        is_due = self.uids.num_done > self.remembered_samples + self.remembered_samples // 8
        if not is_due or self.num_holders or self._is_forgetting:
            return
        self._is_forgetting = True
        chosen = {key: self.uids.num_of(key) for key in self.uids.take_oldest(self.remembered_samples)}
        try:
            # Later lookups query the index.
            await self._store.catch_up()
            if not self.num_holders:
                for key in [key for key, size in chosen.items() if self._forget(key, size)]:
                    del chosen[key]
        finally:
            self._is_forgetting = False
            for key in chosen:
                self._keep(key)

    def _forget(self, key: str, size: int) -> bool:
        # A late sample may have arrived meanwhile, which the index may lack.
        if self.uids.num_of(key) != size or not self.is_done(key):
            return False
        if self.is_complete:
            self.is_complete = False
            self._whole = set(self._groups.by_instance)
        group = self._groups.by_id.get(key)
        if group is not None:
            self._groups.forget(group)
            left = self._groups.by_instance.get(group.instance_id, ())
            # It would be looked up again only if it is among the newest.
            if sum(other.row.epoch > group.row.epoch for other in left) < NEWEST_GROUPS:
                self._whole.discard(group.instance_id)
        self.uids.forget(key)
        self._num_forgotten += 1
        return True

    def _keep(self, key: str) -> None:
        group = self._groups.by_id.get(key)
        # A live group is added here when it ends.
        if group is None or group.state not in LIVE:
            self.uids.mark_done(key)

    # --- after loading

    def restore(self, uids: dict[str, list[str]] | None) -> None:
        """Load the uids of a run whose groups were all loaded; None if only live groups were."""
        self.is_complete = uids is not None
        for key, known in (uids or {}).items():
            self.uids.learn(key, known)
        for key in {*(uids or {}), *self._groups.by_id}:
            self._keep(key)
