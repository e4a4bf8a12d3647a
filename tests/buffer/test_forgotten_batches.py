"""Batches that have left memory: which do, and that they are asked for only by those who name them."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from forebay.buffer import batches as batch_rules
from forebay.buffer import restore
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.store.abc import Store
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.errors import BatchAcked, BatchNotFound, CheckpointConflict, LeaseLost
from forebay.core.records.rows import BatchRow
from tests.buffer.buffer_kit import fill, make_run, open_buffer, read, take, uids_of


class CountingBatchStore(MemoryStore):
    """Counts how often batches are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.pages: list[int] = []

    async def load_batches(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[BatchRow]:
        self.asked["all"] += 1
        found = await super().load_batches(run_id, after=after, limit=limit)
        self.pages.append(len(found))
        await asyncio.sleep(0)
        return found

    async def find_batches(self, run_id: str, batch_ids: Sequence[str]) -> list[BatchRow]:
        self.asked["some"] += len(batch_ids)
        await asyncio.sleep(0)
        return await super().find_batches(run_id, batch_ids)


async def add_run(buffer: Buffer, num_groups: int, **settings: int) -> LiveRun:
    entry = await buffer.add(make_run(**settings))
    await more(entry, num_groups)
    return entry


async def more(entry: LiveRun, num_groups: int) -> None:
    """So many groups of two samples."""
    first = entry.buffer.groups.num_opened
    for number in range(first, first + num_groups):
        await fill(entry, number, [0.0, 1.0])


async def deliver(entry: LiveRun, num_batches: int) -> list[str]:
    """Batches of one group that are acknowledged, oldest first."""
    return [(await take(entry, num_groups=1)).batch_id for _ in range(num_batches)]


def in_memory(entry: LiveRun) -> list[str]:
    return [row.batch_id for row in entry.buffer.batches.in_state(*batch_rules.BatchState)]


async def test_the_newest_stay_and_the_oldest_go(store: Store) -> None:
    async with open_buffer(store, remembered_samples=9) as buffer:
        entry = await add_run(buffer, 8)
        ids = await deliver(entry, 8)
        await buffer.tick()
        assert in_memory(entry) == ids[-3:], "three of two rows, with one for each batch, are nine"
        assert [row.batch_id for row in await entry.buffer.gone.all_batches()] == ids
    async with open_buffer(store, remembered_samples=9) as buffer:
        entry = buffer.get("run-1")
        assert in_memory(entry) == ids[-3:], "also after a restart"
        assert (await deliver_one_more(entry)).startswith("batch-000009-")


async def deliver_one_more(entry: LiveRun) -> str:
    await more(entry, 1)
    return (await deliver(entry, 1))[0]


async def test_what_is_with_a_trainer_or_may_still_be_acknowledged_never_goes(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 5)
        late = await read(entry, num_groups=1, lease_s=10.0)
        assert late is not None
        entry.delivery.leases.arrived(late.batch_id)
        clock.advance(11)
        await buffer.tick()
        leased, returned = [await read(entry, num_groups=2, lease_s=100.0) for _ in range(2)]
        assert leased is not None
        assert returned is not None
        await entry.delivery.leases.release(returned.batch_id)
        await buffer.tick()
        assert in_memory(entry) == [late.batch_id, leased.batch_id]
        with pytest.raises(LeaseLost, match="released"):
            await entry.delivery.leases.ack(returned.batch_id)


async def test_whoever_names_one_has_it_looked_up_and_no_other(clock: ManualClock) -> None:
    store = CountingBatchStore()
    async with open_buffer(store, clock, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 20)
        ids = await deliver(entry, 10)
        await buffer.tick()
        assert in_memory(entry) == []
        store.asked.clear()
        assert (await entry.delivery.leases.ack(ids[3])).state == "acked"
        assert in_memory(entry) == [ids[3]]
        with pytest.raises(BatchAcked):
            await entry.delivery.leases.release(ids[4])
        with pytest.raises(BatchNotFound):
            await entry.delivery.leases.ack("batch-none")
        assert store.asked == {"some": 3}
        await buffer.tick()
        assert in_memory(entry) == []
        store.asked.clear()
        leased = await read(entry, num_groups=1, request_id="new")
        assert leased is not None
        await entry.delivery.leases.ack(leased.batch_id)
        assert [row.state for row in await entry.buffer.gone.all_batches(batch_rules.BatchState.LEASED)] == []
        assert not store.asked, "nobody who reads and acknowledges waits for the index"


async def test_an_old_request_is_known_and_the_oldest_is_a_new_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_rules, "REMEMBERED_REQUESTS", 2)
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 4)
        for name in ("a", "b", "c"):
            await take(entry, num_groups=1, request_id=name)
        await buffer.tick()
        for name in ("b", "c"):
            with pytest.raises(BatchAcked):
                await read(entry, num_groups=1, request_id=name)
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = buffer.get("run-1")
        with pytest.raises(BatchAcked):
            await read(entry, num_groups=1, request_id="c")
        assert await read(entry, num_groups=1, request_id="a") is not None


async def test_the_next_checkpoint_has_what_it_holds_at_hand() -> None:
    store = CountingBatchStore()
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 8)
        leases = entry.delivery.leases
        first = await deliver(entry, 3)
        await buffer.tick()
        assert in_memory(entry) == []
        assert [row.batch_id for row in await checkpoint(leases, 1, first[:1])] == first[:1]
        store.asked.clear()
        later = await deliver(entry, 2)
        await buffer.tick()
        assert in_memory(entry) == [*first, *later], "those of the last, and those that none holds"
        assert [row.batch_id for row in await checkpoint(leases, 2, None)] == [*first[1:], *later]
        assert not store.asked
        await buffer.tick()
        assert in_memory(entry) == [*first[1:], *later]
        await checkpoint(leases, 3, None)
        await buffer.tick()
        assert in_memory(entry) == []
        with pytest.raises(CheckpointConflict, match="fixed to the checkpoint of step 1, not 3"):
            await checkpoint(leases, 3, first[:1])
        assert [row.batch_id for row in await checkpoint(leases, 2, None)] == [*first[1:], *later], "told again"


async def test_a_rewind_keeps_what_the_checkpoint_holds_at_hand(store: Store) -> None:
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 4)
        first, second, third = await deliver(entry, 3)
        for step, batch_id in enumerate((first, second, third), start=1):
            await checkpoint(entry.delivery.leases, step, [batch_id])
        await buffer.tick()
        assert in_memory(entry) == [third]
        undone = await rewind(entry.delivery.leases, 1)
        assert [row.batch_id for row in undone.batches] == [second, third]
        await buffer.tick()
        assert in_memory(entry) == [first]
        assert len(uids_of(await take(entry, num_groups=3))) == 6


async def test_a_restart_loads_batches_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "ROWS_AT_A_TIME", 3)
    store = CountingBatchStore()
    async with open_buffer(store) as buffer:
        ids = await deliver(await add_run(buffer, 7), 7)
    store.pages.clear()
    async with open_buffer(store) as buffer:
        assert in_memory(buffer.get("run-1")) == ids
    assert store.pages == [3, 3, 1, 0]


async def test_a_batch_that_changes_while_all_are_listed_is_told_as_it_is() -> None:
    store = CountingBatchStore()
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 3)
        await deliver(entry, 1)
        await buffer.tick()
        leased = await read(entry, num_groups=1)
        assert leased is not None
        listing = asyncio.create_task(entry.buffer.gone.all_batches())
        await asyncio.sleep(0)
        entry.delivery.leases.ack_soon(leased.batch_id)
        await buffer.tick()
        assert [row.state for row in await listing] == ["acked", "acked"]
        await buffer.tick()
        assert in_memory(entry) == []


async def test_while_all_are_needed_none_goes_and_what_is_in_memory_stays_as_it_is(
    store: Store, clock: ManualClock
) -> None:
    async with open_buffer(store, clock, remembered_samples=0) as buffer:
        entry = await add_run(buffer, 3)
        ids = await deliver(entry, 2)
        await buffer.tick()
        leased = await read(entry, num_groups=1, lease_s=10.0)
        assert leased is not None
        entry.delivery.leases.arrived(leased.batch_id)
        async with entry.buffer.gone.everything():
            assert in_memory(entry) == [*ids, leased.batch_id]
            clock.advance(11)
            await buffer.tick()
            assert in_memory(entry) == [*ids, leased.batch_id]
        await buffer.tick()
        assert in_memory(entry) == [leased.batch_id]
        assert [row.state for row in await entry.buffer.gone.all_batches()] == ["acked", "acked", "expired"]
