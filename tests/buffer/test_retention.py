"""What is removed and what stays, on every store, while readers are at work."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from forebay.buffer.batches import RewoundRows
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.parts import at_rest
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.retention import Retention
from forebay.buffer.retention_rules import Keep
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.errors import BodiesGone, StorageFailed
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.core.records.rows import StoredSample
from tests.buffer.buffer_kit import check_books, fill, make_run, open_buffer, read, rows_of, turns, uids_of
from tests.buffer.store.faulty_disks import RefusingFiles

SEGMENT_BYTES = 12_000


@pytest.fixture
def store(store: Store, tmp_path: Path) -> Store:
    """With segments of a few groups each."""
    if isinstance(store, MemoryStore):
        return MemoryStore(segment_bytes=SEGMENT_BYTES)
    return JournalStore(tmp_path / "small", segment_bytes=SEGMENT_BYTES)


@pytest.fixture(params=[65_536, 0], ids=["remembered", "gone"])
async def buffer(store: Store, clock: ManualClock, request: pytest.FixtureRequest) -> AsyncIterator[Buffer]:
    """Also one in which each batch leaves memory with its groups."""
    async with open_buffer(store, clock, remembered_samples=request.param) as buffer:
        yield buffer


@pytest.fixture
async def entry(buffer: Buffer) -> LiveRun:
    return await buffer.add(make_run(keep_checkpoints=1))


@pytest.fixture
def retention(buffer: Buffer) -> Retention:
    return Retention(buffer, every_s=None)


async def write(entry: LiveRun, *instances: int) -> None:
    for instance in instances:
        await fill(entry, instance, [0.0, 1.0], text="x" * 700)


async def lease(entry: LiveRun, num_groups: int) -> LeasedBatch:
    batch = await read(entry, num_groups=num_groups)
    assert batch is not None
    entry.delivery.leases.arrived(batch.batch_id)
    return batch


async def train(entry: LiveRun, step: int) -> None:
    """Twelve groups more that a checkpoint holds."""
    await write(entry, *range(12 * step, 12 * step + 12))
    batch = await lease(entry, 12)
    await checkpoint(entry.delivery.leases, step, [batch.batch_id])
    await entry.buffer.gone.forget()


async def test_what_is_found_while_it_moves_is_looked_up_again(buffer: Buffer, entry: LiveRun) -> None:
    await train(entry, 1)
    store, groups = buffer.store, await buffer.store.load_groups(entry.run.run_id)
    [first, *_] = await store.segments()
    found = list[bool]()

    async def look_up() -> list[StoredSample]:
        samples = await store.samples(entry.run.run_id, groups[0].group_id)
        if not found:
            store.begin_removal(first.number)
            asyncio.get_running_loop().call_soon(store.cancel_removal, first.number)
        found.append(store.holds(samples[0].location))
        return samples

    samples = await at_rest(store, look_up)
    assert found == [False, True]
    assert len(await store.read([each.location for each in samples])) == 2


def segments_of(entry: LiveRun, instance: InstanceId) -> set[int]:
    """Where memory has the samples of a live group."""
    [group] = entry.buffer.groups.by_instance[instance]
    return {sample.location.segment for sample in group.samples if sample.location is not None}


async def test_only_what_no_kept_checkpoint_holds_goes(entry: LiveRun, retention: Retention) -> None:
    await train(entry, 1)
    assert (await retention.collect()).num_segments_freed == 0
    await train(entry, 2)
    done = await retention.collect()
    assert done.num_segments_freed > 1
    assert done.kept.keys() == {Keep.CHECKPOINTED}
    with pytest.raises(BodiesGone, match="groups cannot be redelivered"):
        await rewind(entry.delivery.leases, None)
    assert (await rewind(entry.delivery.leases, 1)).batches
    batch = await lease(entry, 12)
    assert len(rows_of(batch)) == 24
    check_books(entry)


async def test_ready_groups_move_and_can_be_read_before_and_after_a_restart(
    store: Store, clock: ManualClock, buffer: Buffer, entry: LiveRun, retention: Retention
) -> None:
    await write(entry, 1_000)
    first = await lease(entry, 1)
    expected = uids_of(first)
    old = segments_of(entry, 1_000)
    await train(entry, 1)
    await train(entry, 2)
    assert (await retention.collect()).kept[Keep.LEASED] > 1_400
    assert segments_of(entry, 1_000) == old
    await entry.delivery.leases.release(first.batch_id)
    done = await retention.collect()
    assert done.num_segments_freed >= 1
    assert not segments_of(entry, 1_000) & old
    again = await lease(entry, 1)
    assert uids_of(again) == expected
    await entry.delivery.leases.release(again.batch_id)
    await buffer.__aexit__(None, None, None)
    await buffer.__aenter__()
    last = await lease(buffer.get("run-1"), 1)
    assert uids_of(last) == expected


async def test_groups_leased_while_they_move_keep_their_old_bodies_until_they_are_back(
    entry: LiveRun, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply that carries them may know the old place."""
    store, leased = entry.buffer.store, []
    await write(entry, 1_000)
    first = await lease(entry, 1)
    old = segments_of(entry, 1_000)
    await train(entry, 1)
    await train(entry, 2)
    await entry.delivery.leases.release(first.batch_id)
    clear = store.clear

    async def clear_and_lease(segment: int, moved: set[tuple[str, str]], *bare: set[tuple[str, str]]) -> None:
        await clear(segment, moved, *bare)
        if moved:
            leased.append(await lease(entry, 1))

    with monkeypatch.context() as patch:
        patch.setattr(store, "clear", clear_and_lease)
        await retention.collect()
    [batch] = leased
    assert [group.instance_id for group in batch.groups] == [1_000]
    assert not segments_of(entry, 1_000) & old, "memory knows the new place"
    for _ in range(2):
        assert old <= await numbers(store)
        await retention.collect()
    await entry.delivery.leases.release(batch.batch_id)
    await retention.collect()
    assert not old & await numbers(store)
    assert uids_of(await lease(entry, 1)) == uids_of(batch)


async def numbers(store: Store) -> set[int]:
    return {segment.number for segment in await store.segments()}


async def test_a_rewind_that_begins_while_a_segment_is_cleared_waits_and_is_refused_whole(
    entry: LiveRun, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = entry.buffer.store
    await train(entry, 1)
    await train(entry, 2)
    clear, before = store.clear, entry.buffer.groups.states.copy()
    rewinds: list[asyncio.Task[RewoundRows]] = []

    async def clear_and_rewind(segment: int, moved: set[tuple[str, str]], *bare: set[tuple[str, str]]) -> None:
        rewinds.append(asyncio.create_task(rewind(entry.delivery.leases, None)))
        await turns(20)
        assert not rewinds[-1].done()
        await clear(segment, moved, *bare)

    with monkeypatch.context() as patch:
        patch.setattr(store, "clear", clear_and_rewind)
        await retention.collect()
    results = await asyncio.gather(*rewinds, return_exceptions=True)
    assert {type(result) for result in results} == {BodiesGone}
    assert entry.buffer.groups.states == before


async def test_a_rewind_waits_for_bodies_that_are_being_moved(
    entry: LiveRun, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = entry.buffer.store
    await write(entry, 1_000)
    unfixed = await lease(entry, 1)
    await train(entry, 1)
    await train(entry, 2)
    await entry.delivery.leases.ack(unfixed.batch_id)
    clear = store.clear
    rewinds: list[asyncio.Task[RewoundRows]] = []

    async def clear_and_rewind(segment: int, moved: set[tuple[str, str]], *bare: set[tuple[str, str]]) -> None:
        if moved and not rewinds:
            rewinds.append(asyncio.create_task(rewind(entry.delivery.leases, 2)))
            await turns(20)
        await clear(segment, moved, *bare)

    with monkeypatch.context() as patch:
        patch.setattr(store, "clear", clear_and_rewind)
        await retention.collect()
    [undone] = await asyncio.gather(*rewinds)
    assert [row.batch_id for row in undone.batches] == [unfixed.batch_id]
    assert uids_of(await lease(entry, 1)) == uids_of(unfixed)
    check_books(entry)


async def test_a_rewind_that_reads_while_its_groups_are_condemned_is_refused(
    entry: LiveRun, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at the samples before, and would bring back groups whose bodies are about to go."""
    store = entry.buffer.store
    await train(entry, 1)
    await train(entry, 2)
    samples_of, done = store.samples_of, []

    async def read_and_collect(run_id: str, group_ids: list[str]) -> object:
        found = await samples_of(run_id, group_ids)
        patch.undo()
        done.append(await retention.collect())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(store, "samples_of", read_and_collect)
        with pytest.raises(BodiesGone):
            await rewind(entry.delivery.leases, None)
    assert done[0].num_segments_freed > 1
    assert entry.buffer.groups.is_any(GroupState.ACKED)
    assert not entry.buffer.groups.is_any(GroupState.READY)


async def test_open_groups_pin_their_segment_whatever_the_budget(store: Store, entry: LiveRun, buffer: Buffer) -> None:
    await fill(entry, "open", [0.5], text="x" * 700)
    await train(entry, 1)
    await train(entry, 2)
    done = await Retention(buffer, max_bytes=1, every_s=None).collect()
    assert done.num_bytes_over == done.num_bytes - 1
    assert done.kept[Keep.OPEN] > 700
    assert segments_of(entry, "open") == {1}
    assert 1 in await numbers(store)


async def test_failed_samples_and_discarded_groups_go_by_age(
    entry: LiveRun, retention: Retention, clock: ManualClock
) -> None:
    await fill(entry, "failed", [None, None], text="x" * 700)
    await write(entry, *range(12))
    batch = await lease(entry, 12)
    [failed] = entry.buffer.groups.in_state(GroupState.DISCARDED)
    assert failed.row.reason == "failed"
    assert (await retention.collect()).kept.keys() == {Keep.IN_BUDGET, Keep.LEASED}
    await checkpoint(entry.delivery.leases, 1, [batch.batch_id])
    assert (await retention.collect()).kept.keys() == {Keep.RECENT, Keep.CHECKPOINTED}
    clock.advance(10)
    await train(entry, 2)
    assert (await retention.collect()).num_segments_freed >= 1
    shown = await entry.buffer.store.samples("run-1", failed.group_id)
    assert [(s.row.reward, s.row.error) for s in shown] == [(None, "no")] * 2
    assert not any(entry.buffer.store.holds(sample.location) for sample in shown)


async def test_a_disk_that_refuses_while_clearing_loses_nothing(tmp_path: Path, clock: ManualClock) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path, segment_bytes=SEGMENT_BYTES, files=files), clock) as buffer:
        entry = await buffer.add(make_run(keep_checkpoints=1))
        await train(entry, 1)
        await train(entry, 2)
        retention = Retention(buffer, every_s=None)
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await retention.collect()
        files.refuses_sync = False
        await healthy(buffer)
        entry = buffer.get("run-1")
        assert (await rewind(entry.delivery.leases, None)).batches, "nothing has gone, and nothing is condemned"
        assert len(rows_of(await lease(entry, 24))) == 48


async def healthy(buffer: Buffer) -> None:
    async with asyncio.timeout(30):
        while not buffer.is_healthy:  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.01)


async def test_a_journal_that_lacks_something_in_its_index_keeps_the_segment(
    tmp_path: Path, clock: ManualClock
) -> None:
    """What the index does not know could not be written again."""
    async with open_buffer(JournalStore(tmp_path, segment_bytes=SEGMENT_BYTES), clock) as buffer:
        entry = await buffer.add(make_run(keep_checkpoints=1))
        await train(entry, 1)
        await train(entry, 2)
        await entry.buffer.store.load_runs()
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
            index.execute("DELETE FROM samples WHERE seq = (SELECT min(seq) FROM samples)")
        with pytest.raises(StorageFailed, match="index lacks a SampleRow"):
            await Retention(buffer, every_s=None).collect()
        assert 1 in await numbers(entry.buffer.store)


async def test_it_collects_when_it_is_asked_and_from_time_to_time(buffer: Buffer, entry: LiveRun) -> None:
    await train(entry, 1)
    await train(entry, 2)
    async with Retention(buffer, every_s=3_600) as retention:
        retention.ask()
        await gone(entry)
    await train(entry, 3)
    before = entry.buffer.store.stats().num_segments
    async with Retention(buffer, every_s=0.01):
        async with asyncio.timeout(30):
            while entry.buffer.store.stats().num_segments >= before:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)


async def gone(entry: LiveRun) -> None:
    async with asyncio.timeout(30):
        while 1 in await numbers(entry.buffer.store):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
