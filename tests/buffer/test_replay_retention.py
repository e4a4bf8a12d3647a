"""Bodies that no checkpoint needs stay for replays: up to a budget, for whole runs, and while one is being replayed."""

import pytest

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.journal_source import JournalSource
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.retention import Retention
from forebay.buffer.retention_rules import Keep
from forebay.core.errors import BodiesGone
from tests.buffer.buffer_kit import check_books, fill, make_run, read, rows_of
from tests.buffer.test_retention import buffer, entry, store

__all__ = ["buffer", "entry", "store"]

STEP_BYTES = 12 * 2 * 700
"""Of the text of one step's samples."""


async def train(entry: LiveRun, *steps: int) -> None:
    """For each step twelve groups that a checkpoint holds."""
    for step in steps:
        for instance in range(12 * step, 12 * step + 12):
            await fill(entry, instance, [0.0, 1.0], text="x" * 700)
        batch = await read(entry, num_groups=12)
        assert batch is not None
        entry.delivery.leases.arrived(batch.batch_id)
        await checkpoint(entry.delivery.leases, step, [batch.batch_id])
        await entry.buffer.gone.forget()


async def whole_steps(entry: LiveRun) -> list[int]:
    """The steps of which every body is there, as a replay finds them."""
    source = JournalSource(entry.run, entry.buffer.store)
    found = []
    for batch in await source.batches():
        samples = [each for group in (await source.samples(batch.group_ids)).values() for each in group]
        if all(map(source.has_body, samples)):
            assert len(await source.bodies(samples)) == len(samples) == 24
            found.append(batch.checkpoint_step or 0)
    return found


async def test_the_oldest_go_first_beyond_the_budget(buffer: Buffer, entry: LiveRun) -> None:
    retention = Retention(buffer, every_s=None, replay_bytes=4 * STEP_BYTES)
    await train(entry, 1, 2, 3)
    done = await retention.collect()
    assert done.kept[Keep.REPLAYABLE] == retention.num_replayable_bytes > STEP_BYTES
    assert await whole_steps(entry) == [1, 2, 3]
    await train(entry, *range(4, 11))
    done = await retention.collect()
    assert done.num_segments_freed > 3
    assert retention.num_replayable_bytes <= 4 * STEP_BYTES
    left = await whole_steps(entry)
    assert left == list(range(left[0], 11))
    assert 6 <= left[0] <= 8


async def test_what_is_there_for_replays_can_be_gone_back_to(buffer: Buffer, entry: LiveRun) -> None:
    retention = Retention(buffer, every_s=None, replay_bytes=1 << 30)
    await train(entry, 1, 2, 3, 4)
    assert (await retention.collect()).kept[Keep.REPLAYABLE] > STEP_BYTES
    assert len((await rewind(entry.delivery.leases, 1)).batches) == 3
    assert (await retention.collect()).kept.get(Keep.REPLAYABLE, 0) == 0, "a trainer will ask for all of it"
    batch = await read(entry, num_groups=36)
    assert batch is not None
    assert len(rows_of(batch)) == 72
    check_books(entry)


async def test_a_run_that_keeps_its_bodies_gives_them_up_for_want_of_room_only(buffer: Buffer) -> None:
    kept = await buffer.add(make_run(keep_checkpoints=1, keep_bodies=True))
    other = await buffer.add(make_run("run-2", keep_checkpoints=1))
    await train(kept, 1, 2, 3)
    await train(other, 1, 2, 3)
    done = await Retention(buffer, every_s=None).collect()
    assert done.num_segments_freed > 1
    assert done.kept[Keep.KEPT] > STEP_BYTES
    assert await whole_steps(kept) == [1, 2, 3]
    assert await whole_steps(other) == [3]
    done = await Retention(buffer, max_bytes=1, every_s=None).collect()
    assert done.kept[Keep.KEPT] < STEP_BYTES
    assert await whole_steps(kept) == [3]


async def test_for_want_of_room_what_only_replays_need_goes_first(buffer: Buffer, entry: LiveRun) -> None:
    other = await buffer.add(make_run("run-2"))
    for instance in range(12):
        await fill(other, instance, [0.0, 1.0], text="x" * 700)
    batch = await read(other, num_groups=12)
    assert batch is not None
    other.delivery.leases.arrived(batch.batch_id)
    await other.delivery.leases.ack(batch.batch_id)
    await train(entry, 1, 2, 3)
    retention = Retention(buffer, every_s=None, replay_bytes=1 << 30)
    assert (await retention.collect()).kept[Keep.REPLAYABLE] > STEP_BYTES
    assert await whole_steps(entry) == [1, 2, 3]
    room = buffer.store.stats().num_bytes - STEP_BYTES // 2
    done = await Retention(buffer, room, every_s=None, replay_bytes=1 << 30).collect()
    assert done.num_bytes_over == 0
    assert await whole_steps(entry) == [2, 3]
    assert await whole_steps(other) == [0], "though it is the oldest"


async def test_a_source_in_use_stays_whatever_the_budgets(buffer: Buffer, entry: LiveRun) -> None:
    await train(entry, 1, 2, 3)
    buffer.sources[entry.run.run_id] += 1
    retention = Retention(buffer, max_bytes=1, every_s=None)
    assert (await retention.collect()).kept.keys() == {Keep.SOURCE}
    assert await whole_steps(entry) == [1, 2, 3]
    buffer.sources[entry.run.run_id] -= 1
    assert (await retention.collect()).num_segments_freed > 1
    with pytest.raises(BodiesGone):
        await rewind(entry.delivery.leases, None)


async def test_what_nobody_needs_is_not_looked_up_again_and_again(
    buffer: Buffer, entry: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = Retention(buffer, every_s=None, replay_bytes=1 << 30)
    await train(entry, *range(1, 9))
    await retention.collect(surveys=False)
    looked: list[int] = []
    find_gone = retention._find_gone
    monkeypatch.setattr(retention, "_find_gone", lambda segment: looked.append(segment.number) or find_gone(segment))
    await retention.collect(surveys=False)
    assert 1 not in looked
    assert len(looked) < len(await buffer.store.segments()) // 3, "only those around the last checkpoint"
    await rewind(entry.delivery.leases, 2)
    looked.clear()
    await retention.collect(surveys=False)
    assert len(looked) == len(await buffer.store.segments()), "it went back"
