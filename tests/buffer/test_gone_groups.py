"""Groups that have left memory: nothing is different without them."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forebay.buffer.admission import announce, write_when_room
from forebay.buffer.buffer import Buffer
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.resume import covers, reconcile, skip_instance_ids
from forebay.buffer.store.abc import Store
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.errors import LeaseLost
from forebay.core.ids import InstanceId
from forebay.core.records.rows import FoundGroup
from forebay.core.sample import read_any_sample
from tests.buffer.buffer_kit import check_books, end_process, make_run, open_buffer, read, states, take, uids_of
from tests.kit import make_sample


class CountingStore(MemoryStore):
    """Counts how often groups are looked up."""

    num_found = 0

    async def find(
        self, run_id: str, group_ids: Sequence[str], instance_ids: Sequence[InstanceId] = (), *, has_uids: bool = True
    ) -> list[FoundGroup]:
        self.num_found += 1
        await asyncio.sleep(0)
        return await super().find(run_id, group_ids, instance_ids, has_uids=has_uids)


@asynccontextmanager
async def forgetful(store: Store, clock: ManualClock | None = None) -> AsyncIterator[Buffer]:
    """A buffer whose run keeps no group that is done with; the group of ``one`` is gone already, uids a and b."""
    async with open_buffer(store, clock, remembered_samples=0) as buffer:
        entry = await buffer.add(make_run())
        for uid, reward in (("a", 0.0), ("b", 1.0)):
            assert await send(buffer, uid, instance_id="one", reward=reward) == "member"
        await take(entry)
        await buffer.tick()
        assert not entry.buffer.groups.by_id
        assert not list(entry.buffer.uids)
        yield buffer


async def send(buffer: Buffer, uid: str, **changes: Any) -> str:
    """What becomes of a sample."""
    sample = read_any_sample(json.dumps(make_sample(uid=uid, **changes)).encode())
    receipt = await write_when_room(buffer.get("run-1").buffer, sample, 0.0)
    await receipt.stored
    return "duplicate" if receipt.is_duplicate else receipt.outcome


@pytest.mark.parametrize("place", [{}, {"epoch": 0}, {"epoch": 0, "slot": 1}])
async def test_a_sample_of_a_group_that_is_gone_is_known(store: Store, place: dict[str, int]) -> None:
    async with forgetful(store) as buffer:
        assert await send(buffer, "b", instance_id="one", **place) == "duplicate"
        await buffer.tick()
        assert await send(buffer, "a", instance_id="one", reward=0.0, **place) == "duplicate"
        check_books(buffer.get("run-1"))


async def test_a_group_that_is_gone_takes_nothing_more(store: Store) -> None:
    async with forgetful(store) as buffer:
        assert await send(buffer, "c", instance_id="one", epoch=0, slot=0) == "late"
        assert await send(buffer, "c", instance_id="one", epoch=0, slot=0) == "duplicate"
        await buffer.tick()
        assert await send(buffer, "c", instance_id="one", epoch=0, slot=0) == "duplicate"


async def test_a_writer_without_epochs_goes_on_with_the_next_one(store: Store) -> None:
    async with forgetful(store) as buffer:
        assert await send(buffer, "c", instance_id="one") == "member"
        assert states(buffer.get("run-1")) == {("one", 0): "acked", ("one", 1): "open"}
        await buffer.tick()  # the older one goes again, while the newer one is open
        assert states(buffer.get("run-1")) == {("one", 1): "open"}
        assert await send(buffer, "a", instance_id="one", reward=0.0) == "duplicate"


async def test_a_straggler_of_a_group_that_is_gone_does_not_begin_the_next(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock, remembered_samples=0) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        assert await send(buffer, "a", instance_id=7, reward=0.0) == "member"
        clock.advance(301)
        await buffer.tick()
        for uid in ("b", "c", "d", "e"):
            await send(buffer, uid, instance_id=8, reward=float(uid == "b"))
        assert [group.instance_id for group in (await take(entry)).reported] == [7]
        await buffer.tick()
        assert not entry.buffer.groups.by_id
        assert await send(buffer, "f", instance_id=7) == "late"
        clock.advance(301)
        await buffer.tick()
        assert await send(buffer, "g", instance_id=7) == "member"


@pytest.mark.parametrize("place", [{}, {"epoch": 0}])
async def test_what_came_after_the_end_is_known_once_it_is_gone(
    store: Store, clock: ManualClock, place: dict[str, int]
) -> None:
    async with forgetful(store, clock) as buffer:
        await end_process(buffer)
        clock.advance(301)
        await buffer.tick()
        assert await send(buffer, "late", instance_id="two", **place) == "late"
        await buffer.tick()
        assert not list(buffer.get("run-1").buffer.uids)
        assert await send(buffer, "late", instance_id="two", **place) == "duplicate"


@pytest.mark.parametrize("num_steps", range(8))
async def test_a_lookup_that_begins_as_another_ends_leaves_the_loop_free(num_steps: int) -> None:
    async with forgetful(CountingStore()) as buffer:
        gone = buffer.get("run-1").buffer.gone
        first = asyncio.create_task(gone.look_up([("one", 0)]))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await gone.look_up([("two", 0)])
        await first
        assert gone.knows("one", 0)
        assert gone.knows("two", 0)


async def test_a_late_acknowledgement_reads_no_more_than_the_groups_of_its_batch(clock: ManualClock) -> None:
    store = CountingStore()
    async with forgetful(store, clock) as buffer:
        entry = buffer.get("run-1")
        for uid, reward in (("c", 0.0), ("d", 1.0)):
            await send(buffer, uid, instance_id="two", reward=reward)
        first, second = await _expired(buffer, clock), await _expired(buffer, clock)
        await entry.delivery.leases.ack(second)
        await buffer.tick()
        assert not entry.buffer.groups.by_id
        with pytest.raises(LeaseLost, match="has its groups now"):
            await entry.delivery.leases.ack(first)
        assert states(entry) == {("two", 0): "acked"}
        await buffer.tick()
        assert not entry.buffer.groups.by_id


async def _expired(buffer: Buffer, clock: ManualClock) -> str:
    """A batch whose lease has expired."""
    batch = await read(buffer.get("run-1"), lease_s=10.0)
    assert batch is not None
    buffer.get("run-1").delivery.leases.arrived(batch.batch_id)
    clock.advance(11)
    await buffer.tick()
    return batch.batch_id


async def test_a_read_that_looks_for_old_weights_passes_over_what_is_gone(store: Store) -> None:
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = await buffer.add(make_run(max_staleness=0))
        entry.run.weight_version = 1
        for uid, reward in (("a", 0.0), ("b", 1.0)):
            await send(buffer, uid, instance_id="one", reward=reward, weight_version=1)
        await take(entry)
        await buffer.tick()
        assert not entry.buffer.groups.by_id
        entry.run.weight_version = 5
        assert await read(entry) is None


async def test_the_numbers_of_a_run_count_what_is_gone(store: Store) -> None:
    async with forgetful(store) as buffer:
        entry = buffer.get("run-1")
        groups = entry.buffer.groups
        assert (groups.states["acked"], groups.num_closed, groups.num_opened) == (1, 1, 1)
        assert [row.closed_seq for row in await entry.buffer.gone.closed_since(0)] == [1]
        assert await skip_instance_ids(buffer.get("run-1").buffer) == ["one"]
        await send(buffer, "x", instance_id="two")
        assert groups.by_instance["two"][0].row.number == 2


async def test_a_rewind_brings_back_what_is_gone(store: Store) -> None:
    async with forgetful(store) as buffer:
        entry = buffer.get("run-1")
        await rewind(entry.delivery.leases, None)
        await buffer.tick()
        assert await send(buffer, "a", instance_id="one", epoch=0) == "duplicate"
        assert sorted(uids_of(await take(entry))) == ["a", "b"]
        check_books(entry)


async def test_a_checkpoint_holds_what_is_gone(store: Store) -> None:
    async with forgetful(store) as buffer:
        entry = buffer.get("run-1")
        [row] = await checkpoint(entry.delivery.leases, 1, None)
        assert row.checkpoint_step == 1
        await rewind(entry.delivery.leases, 1)
        await buffer.tick()
        assert not entry.buffer.groups.by_id


async def test_a_resume_by_list_knows_what_is_gone(store: Store) -> None:
    async with forgetful(store) as buffer:
        entry = buffer.get("run-1")
        async with entry.buffer.gone.everything():
            assert covers(entry.buffer, ["one"])
        await reconcile(entry.delivery.leases, [])
        assert sorted(uids_of(await take(entry))) == ["a", "b"]


async def test_a_restart_loads_what_is_in_use_alone(store: Store) -> None:
    async with forgetful(store) as buffer:
        await send(buffer, "c", instance_id="two", epoch=0, slot=0)
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = buffer.get("run-1")
        assert states(entry) == {("two", 0): "open"}
        assert entry.buffer.groups.states["acked"] == 1
        assert await send(buffer, "c", instance_id="two", epoch=0, slot=0) == "duplicate"
        assert await send(buffer, "a", instance_id="one", reward=0.0) == "duplicate"
        assert await send(buffer, "d", instance_id="two", epoch=0, slot=1) == "member"
        check_books(entry)


async def test_siblings_that_open_a_group_ask_once() -> None:
    store = CountingStore()
    async with forgetful(store) as buffer:
        store.num_found = 0
        places = [{"uid": f"s{n}", "instance_id": f"i{n // 2}", "epoch": 0, "slot": n % 2} for n in range(20)]
        assert await asyncio.gather(*(send(buffer, **place) for place in places)) == ["member"] * 20
        assert store.num_found == 1
        assert await send(buffer, "t", instance_id="i0", epoch=0, slot=0) == "surplus"
        assert store.num_found == 1


async def test_an_announced_group_is_not_looked_up_by_its_samples() -> None:
    store = CountingStore()
    async with forgetful(store) as buffer:
        await announce(buffer.get("run-1").buffer, [("new", 0), ("one", 0)])
        store.num_found = 0
        assert await send(buffer, "c", instance_id="new", epoch=0, slot=0) == "member"
        assert await send(buffer, "d", instance_id="one", epoch=0, slot=0) == "late"
        assert store.num_found == 0
