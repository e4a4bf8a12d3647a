"""For how long a reply may stand still before it is broken off."""

from collections.abc import AsyncIterator

import pytest

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.store.abc import Store
from forebay.core.clock import ManualClock
from forebay.core.group import BatchState
from tests.buffer.buffer_kit import fill, make_run, open_buffer, read, states

LEASE_S = 100.0


@pytest.fixture
async def buffer(store: Store, clock: ManualClock) -> AsyncIterator[Buffer]:
    async with open_buffer(store, clock) as buffer:
        yield buffer


@pytest.fixture
async def entry(buffer: Buffer) -> LiveRun:
    """A run with a group."""
    entry = await buffer.add(make_run())
    await fill(entry, 1, [0.0, 1.0])
    return entry


async def lease(entry: LiveRun, **request: str) -> LeasedBatch:
    batch = await read(entry, num_groups=1, lease_s=LEASE_S, **request)
    assert batch is not None
    return batch


async def test_it_is_as_long_as_the_lease_from_what_the_client_took_last(entry: LiveRun, clock: ManualClock) -> None:
    batch = await lease(entry)
    patience_s = entry.delivery.leases.patience_s
    assert patience_s(batch.batch_id, 0.0) == 100
    clock.advance(70)
    assert patience_s(batch.batch_id, 70.0) == 30
    assert patience_s(batch.batch_id, 20.0) == 80
    clock.advance(30)
    assert patience_s(batch.batch_id, 100.0) == 0


async def test_an_extended_lease_prolongs_it(entry: LiveRun, clock: ManualClock) -> None:
    batch = await lease(entry)
    leases = entry.delivery.leases
    clock.advance(70)
    await leases.extend(batch.batch_id, None)
    assert leases.patience_s(batch.batch_id, 70.0) == 100
    await leases.extend(batch.batch_id, 500.0)
    assert leases.patience_s(batch.batch_id, 70.0) == 500


async def test_a_reply_that_needs_no_acknowledgement_has_ten_minutes(entry: LiveRun) -> None:
    batch = await read(entry)
    assert batch is not None
    assert entry.delivery.leases.patience_s(batch.batch_id, 10.0) == 590


async def test_there_is_none_with_a_batch_that_is_no_longer_leased(entry: LiveRun) -> None:
    batch = await lease(entry)
    await entry.delivery.leases.release(batch.batch_id)
    assert entry.delivery.leases.patience_s(batch.batch_id, 0.0) == 0


async def test_a_lease_expires_though_a_reply_stands_still_once_another_has_arrived(
    buffer: Buffer, entry: LiveRun, clock: ManualClock
) -> None:
    batch = await lease(entry, request_id="again")
    assert await lease(entry, request_id="again")
    clock.advance(LEASE_S)
    await buffer.tick()
    assert states(entry) == {(1, 0): "leased"}
    entry.delivery.leases.arrived(batch.batch_id)
    clock.advance(LEASE_S)
    await buffer.tick()
    assert states(entry) == {(1, 0): "ready"}
    entry.delivery.leases.abandoned(batch.batch_id)
    assert entry.buffer.batches.get(batch.batch_id).state is BatchState.EXPIRED
