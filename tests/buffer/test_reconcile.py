"""A trainer comes back with its list of finished ids: the run becomes exact with respect to it."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from forebay.buffer.admission import expect_repeats
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.resume import covers, num_beyond, reconcile, skip_instance_ids
from forebay.buffer.store.abc import Store
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.errors import LeaseLost
from forebay.core.ids import InstanceId
from forebay.core.records.rows import Location
from tests.buffer.buffer_kit import check_books, fill, make_run, open_buffer, put, read, states, take, uids_of


async def resume(buffer: Buffer, *listed: InstanceId) -> LiveRun:
    """What the server does with a list that the run covers."""
    entry = buffer.get("run-1")
    assert covers(entry.buffer, listed)
    await reconcile(entry.delivery.leases, listed)
    await expect_repeats(buffer.get("run-1").buffer)
    return entry


async def add_with_groups(buffer: Buffer, *instances: InstanceId) -> LiveRun:
    entry = await buffer.add(make_run())
    for instance_id in instances:
        await fill(entry, instance_id, [0.0, 1.0])
    return entry


async def test_listed_groups_stay_and_the_others_come_again_in_order(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 2, 3, 4)
        before = [uids_of(await take(entry, num_groups=1)) for _ in range(3)]
        await resume(buffer, 1)
        assert states(entry) == {(1, 0): "acked", (2, 0): "ready", (3, 0): "ready", (4, 0): "ready"}
        again = [uids_of(await take(entry, num_groups=1)) for _ in range(2)]
        assert again == before[1:]
        check_books(entry)


async def test_what_a_resume_decided_survives_a_restart(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 2)
        await take(entry)
        await resume(buffer, 2)
        before = states(entry)
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        assert states(entry) == before == {(1, 0): "ready", (2, 0): "acked"}
        assert len((await take(entry)).rows) == 2


async def test_group_listed_while_its_ack_was_lost_is_not_sent_again(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 2)
        batch = await read(entry)
        assert batch is not None
        await resume(buffer, 1)
        assert states(entry) == {(1, 0): "acked", (2, 0): "ready"}
        entry.delivery.leases.ack_soon(batch.batch_id)
        assert states(entry)[2, 0] == "ready", "the reply of before the resume counts no more"
        assert entry.buffer.window.num_samples == 4
        check_books(entry)


async def test_batch_that_is_being_fetched_during_a_resume_goes_to_nobody() -> None:
    """Its reader belongs to the trainer of before."""
    store = SlowReads()
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1)
        reader = asyncio.create_task(read(entry))
        await store.is_reading.wait()
        await resume(buffer)
        store.may_read.set()
        assert await reader is None
        assert len((await take(entry)).rows) == 2
        check_books(entry)


class SlowReads(MemoryStore):
    """A store whose bodies come when ``may_read`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading, self.may_read = asyncio.Event(), asyncio.Event()

    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        self.is_reading.set()
        await self.may_read.wait()
        return await super().read(locations)


async def test_undelivered_groups_that_are_not_listed_are_told_again(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [None, None])
        await fill(entry, 2, [0.0, 1.0])
        assert Counter((await take(entry)).meta_info["finished_groups"]) == {1: 1, 2: 1}
        await resume(buffer, 2)
        await fill(entry, 3, [0.0, 1.0])
        assert Counter((await take(entry)).meta_info["finished_groups"]) == {1: 1, 3: 1}


async def test_of_one_id_the_groups_reported_first_are_those_listed(store: Store) -> None:
    """The second epoch was reported before the first."""
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0], epoch=0)
        await fill(entry, 1, [0.0, 1.0], epoch=1)
        await take(entry)
        await fill(entry, 1, [1.0], epoch=0)
        await take(entry)
        await resume(buffer, 1)
        assert states(entry) == {(1, 0): "ready", (1, 1): "acked"}


async def test_order_of_reports_survives_restarts(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        for epoch in (2, 1):
            await fill(entry, 1, [0.0, 1.0], epoch=epoch)
            await take(entry)
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        await fill(entry, 1, [0.0, 1.0], epoch=0)
        await take(entry)
        await resume(buffer, 1, 1)
        assert states(entry) == {(1, 2): "acked", (1, 1): "acked", (1, 0): "ready"}


@pytest.mark.parametrize(
    ("listed", "base_skip", "state"),
    [([7, 7, 7], [7, 7], "acked"), ([7, 7], [7, 7], "ready"), ([7], [7], "ready"), ([], [], "ready")],
)
async def test_first_listings_stand_for_epochs_before_this_run(
    store: Store, listed: list[InstanceId], base_skip: list[InstanceId], state: str
) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(skip=[7, 7]))
        await fill(entry, 7, [0.0, 1.0])
        await take(entry)
        await resume(buffer, *listed)
        assert states(entry) == {(7, 2): state}
        assert entry.run.base_skip == base_skip
        assert Counter(await skip_instance_ids(buffer.get("run-1").buffer)) == Counter([*base_skip, 7])


async def test_list_is_covered_only_as_often_as_ids_were_reported(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 1, 2)
        await take(entry, num_groups=2)
        assert covers(entry.buffer, [1, 1])
        assert not covers(entry.buffer, [1, 1, 1])
        assert not covers(entry.buffer, [2]), "ready, and in no reply"
        assert not covers(entry.buffer, ["1"])


async def test_released_group_is_not_covered(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1)
        batch = await read(entry)
        assert batch is not None
        entry.delivery.leases.release_soon(batch.batch_id)
        assert not covers(entry.buffer, [1])


async def test_batch_whose_reply_a_crash_cut_off_is_known_to_the_trainer_that_lists_it(store: Store) -> None:
    """Its last byte may have gone out before the crash: the list decides."""
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 2, 3)
        await fill(entry, "bad", [None, None])
        batch = await read(entry, num_groups=2, is_slime=True)
        assert batch is not None
        assert batch.meta_info["finished_groups"] == [1, 2, "bad"]
        await batch.stored
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        assert set(states(entry).values()) == {"ready", "discarded: failed"}
        assert not covers(entry.buffer, [3])
        assert covers(entry.buffer, [1, 2, "bad"])
        await resume(buffer, 1, "bad")
        assert states(entry) == {(1, 0): "acked", (2, 0): "ready", (3, 0): "ready", ("bad", 0): "discarded: failed"}
        assert (await take(entry)).meta_info["finished_groups"] == [2, 3]
        check_books(entry)


async def test_beyond_a_list_goes_what_was_reported_or_skipped_and_nothing_in_doubt(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(skip=[7]))
        for instance_id in (1, 1, 2, 3):
            await fill(entry, instance_id, [0.0, 1.0])
        await take(entry, num_groups=3)
        batch = await read(entry, is_slime=True)
        assert batch is not None
        await batch.stored
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        assert covers(entry.buffer, [3]), "its reply was cut off, and may have arrived"
        for listed, num in (([], 4), ([1], 3), ([1, 1, 2, 7], 0), ([3], 4), ([1, 2, 3, 7], 1)):
            assert num_beyond(entry.buffer, listed) == num, listed


async def test_what_a_list_acknowledges_is_a_batch_like_any_other(store: Store) -> None:
    """Also what it says of groups that had ended undelivered: a rewind tells of them again."""
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 2, 3)
        await fill(entry, "bad", [None, None])
        await take(entry, num_groups=1)
        await rewind(entry.delivery.leases, None)
        await resume(buffer, 1, "bad")
        before = states(entry)
        assert before == {(1, 0): "acked", (2, 0): "ready", (3, 0): "ready", ("bad", 0): "discarded: failed"}
        [row] = await checkpoint(entry.delivery.leases, 4, None)
        assert (len(row.group_ids), len(row.reported_ids), row.num_rows) == (1, 1, 2)
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        assert states(entry) == before
        assert (await take(entry, num_groups=1)).meta_info["finished_groups"] == [2]
        await rewind(entry.delivery.leases, 4)
        assert states(entry) == before
        await rewind(entry.delivery.leases, None)
        assert (await take(entry, num_groups=2)).meta_info["finished_groups"] == [1, 2, "bad"]
        check_books(entry)


async def test_a_list_decides_about_a_lease_that_expired(store: Store, clock: ManualClock) -> None:
    """Its trainer may have got it, and may have trained on it."""
    async with open_buffer(store, clock) as buffer:
        entry = await add_with_groups(buffer, 1, 2, 3)
        batch = await read(entry, num_groups=2, lease_s=5.0)
        assert batch is not None
        entry.delivery.leases.arrived(batch.batch_id)
        clock.advance(6)
        await buffer.tick()
        assert set(states(entry).values()) == {"ready"}
        assert not covers(entry.buffer, [3])
    async with open_buffer(store, clock) as buffer:
        entry = await resume(buffer, 2)
        assert states(entry) == {(1, 0): "ready", (2, 0): "acked", (3, 0): "ready"}
        with pytest.raises(LeaseLost, match="its lease expired, and its trainer resumed"):
            await entry.delivery.leases.ack(batch.batch_id)
        assert (await take(entry)).meta_info["finished_groups"] == [1, 3]


async def test_a_resume_and_the_batches_agree(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await add_with_groups(buffer, 1, 2, 3, 4)
        await take(entry, num_groups=2, is_slime=True)
        leased = await read(entry, num_groups=1)
        assert leased is not None
        await resume(buffer, 2)
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        assert states(entry) == {(1, 0): "ready", (2, 0): "acked", (3, 0): "ready", (4, 0): "ready"}
        first, second = entry.buffer.batches.by_id.values()
        two = next(group for group in entry.buffer.groups.by_id.values() if group.instance_id == 2)
        assert (first.state, first.group_ids) == ("acked", [two.group_id])
        assert second.state == "revoked"
        with pytest.raises(LeaseLost, match="resumed without it"):
            await entry.delivery.leases.ack(leased.batch_id)
        await rewind(entry.delivery.leases, None)
        assert set(states(entry).values()) == {"ready"}
        check_books(entry)


async def test_another_process_skips_complete_and_closed_groups(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, "dead", [0.5])
        clock.advance(301)
        await buffer.tick()
        await fill(entry, "full", [0.0, 1.0])
        await fill(entry, "short", [0.0])
        assert Counter(await skip_instance_ids(buffer.get("run-1").buffer)) == {"dead": 1, "full": 1}


async def test_restarted_process_fills_what_is_missing_and_the_rest_is_surplus(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0, 1.0, 1.0])
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        await expect_repeats(buffer.get("run-1").buffer)
        assert await fill(entry, 1, [0.5] * 4) == ["member", "surplus", "surplus", "surplus"]
        assert await fill(entry, 1, [0.5]) == ["member"]
        assert states(entry) == {(1, 0): "open", (1, 1): "open"}


async def test_surplus_still_expected_survives_a_restart_of_the_server_alone(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0, 1.0, 1.0])
        await expect_repeats(buffer.get("run-1").buffer)
        assert await fill(entry, 1, [0.5, 0.5]) == ["member", "surplus"]
    async with open_buffer(store) as buffer:
        assert await fill(buffer.get("run-1"), 1, [0.5] * 3) == ["surplus", "surplus", "member"]


async def test_second_restart_expects_no_repeats_of_a_group_that_became_full(store: Store) -> None:
    """Its instance is skipped then: what comes belongs to the next epoch."""
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0, 1.0, 1.0])
        await expect_repeats(buffer.get("run-1").buffer)
        assert await fill(entry, 1, [0.5, 0.5]) == ["member", "surplus"]
        await expect_repeats(buffer.get("run-1").buffer)
        assert await fill(entry, 1, [0.5] * 4) == ["member"] * 4
        assert states(entry) == {(1, 0): "open", (1, 1): "open"}


async def test_repeats_that_come_under_their_old_uids_are_not_expected_twice() -> None:
    async with open_buffer(MemoryStore()) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        for epoch in range(2):
            for number in range(3):
                put(entry, instance_id=1, uid=f"{epoch}-{number}", reward=number / 3)
            if epoch == 0:
                await expect_repeats(buffer.get("run-1").buffer)
                results = [put(entry, instance_id=1, uid=f"0-{n}", reward=1.0) for n in range(4)]
                assert [result.is_duplicate for result in results] == [True, True, True, False]
        put(entry, instance_id=1, uid="1-3", reward=1.0)
        assert [(g.row.epoch, g.row.num_samples) for g in entry.buffer.groups.by_id.values()] == [(0, 4), (1, 4)]
