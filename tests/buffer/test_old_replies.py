"""A reply that stood still while its batch went on: what it finds out at last is no longer about its groups."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.reads.selection import ReadRequest
from forebay.buffer.retention import Retention
from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed
from tests.buffer.buffer_kit import check_books, fill, make_run, open_buffer, read, states, take, uids_of

ASKED = ReadRequest(num_groups=25, request_id="q")
MISREAD = StorageFailed("the disk did not answer", what="a stored body cannot be read")


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Buffer]:
    """With segments of a few groups each."""
    async with open_buffer(JournalStore(tmp_path, segment_bytes=12_000)) as buffer:
        yield buffer


@pytest.fixture
async def entry(buffer: Buffer) -> LiveRun:
    """25 groups are ready."""
    entry = await buffer.add(make_run(keep_checkpoints=1))
    await write(entry, *range(25))
    return entry


async def write(entry: LiveRun, *instances: int) -> None:
    for instance in instances:
        await fill(entry, instance, [0.0, 1.0], text="x" * 700)


async def begin(entry: LiveRun) -> LeasedBatch:
    """A reply that has begun, and of which no row was read yet."""
    batch = await entry.delivery.prepare(ASKED)
    assert batch is not None
    assert await entry.delivery.confirm(batch)
    return batch


async def go_on(entry: LiveRun, batch: LeasedBatch) -> StorageFailed:
    """Read the rows of a reply, as far as that is possible, and end it."""
    try:
        async for _ in batch.rows.chunks():
            pass
    except StorageFailed as error:
        await fail(entry, batch, error)
        return error
    raise AssertionError("every row could be read")


async def fail(entry: LiveRun, batch: LeasedBatch, error: StorageFailed) -> None:
    await entry.delivery.broken(batch, error)
    entry.delivery.leases.abandoned(batch.batch_id)


async def lease(entry: LiveRun, num_groups: int) -> str:
    batch = await read(entry, num_groups=num_groups)
    assert batch is not None
    entry.delivery.leases.arrived(batch.batch_id)
    return batch.batch_id


async def move_one(buffer: Buffer, entry: LiveRun) -> None:
    """Let group 12 be ready again, and retention remove the segment in which it was."""
    leases = entry.delivery.leases
    before, kept, after = await lease(entry, 12), await lease(entry, 1), await lease(entry, 12)
    await leases.release(kept)
    await checkpoint(leases, 1, [before, after])
    await checkpoint(leases, 2, [])
    sample = entry.buffer.groups.by_instance[12][0].samples[0]
    old = sample.location
    await Retention(buffer, every_s=None).collect()
    assert sample.location != old


async def test_a_reply_of_before_ack_and_rewind_leaves_the_groups_alone(
    buffer: Buffer, entry: LiveRun, caplog: pytest.LogCaptureFixture
) -> None:
    old = await begin(entry)
    again = await read(entry, num_groups=25, request_id="q")
    assert again is not None
    assert again.batch_id == old.batch_id
    await entry.delivery.leases.ack(again.batch_id)
    await rewind(entry.delivery.leases, None)
    await move_one(buffer, entry)
    before = states(entry)
    assert before[12, 0] == "ready"
    assert "No such file" in str(await go_on(entry, old))
    assert states(entry) == before
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "nothing has gone wrong"
    check_books(entry)
    assert uids_of(await take(entry, num_groups=1)) == uids_of(again)[24:26]


async def test_a_reply_that_fails_for_a_reason_of_its_own_costs_no_group(entry: LiveRun) -> None:
    await fail(entry, await begin(entry), MISREAD)
    assert set(states(entry).values()) == {"ready"}
    assert len(uids_of(await take(entry, num_groups=25))) == 50


async def test_nor_the_lease_of_a_batch_that_arrived_over_another_connection(entry: LiveRun) -> None:
    old, new = await begin(entry), await begin(entry)
    entry.delivery.leases.arrived(new.batch_id)
    await fail(entry, old, MISREAD)
    assert set(states(entry).values()) == {"leased"}
    assert (await entry.delivery.leases.ack(new.batch_id)).state == "acked"


async def test_a_damaged_body_ends_its_group_and_gives_the_others_back(
    entry: LiveRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = await begin(entry)
    [first, *_] = sorted((tmp_path / "segments").glob("*.log"))
    first.rename(first.with_suffix(".lost"))
    await go_on(entry, batch)
    lost = {instance for (instance, _), state in states(entry).items() if state == "discarded: unreadable"}
    assert lost
    assert {state for (instance, _), state in states(entry).items() if instance not in lost} == {"ready"}
    told = [record.args[1] for record in caplog.records if " discarded: " in record.message and record.args]
    assert told == sorted(lost), "one line for each"
    assert len(uids_of(await take(entry, num_groups=25 - len(lost)))) == 2 * (25 - len(lost))
