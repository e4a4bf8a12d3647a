"""Forks of a rollout: rows of its group that fill no slot, and go out with the main sample that was judged."""

from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.buffer import LiveRun
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.store.abc import Store
from forebay.core.clock import ManualClock
from forebay.core.group import GroupState
from tests.buffer.buffer_kit import (
    check_books,
    file_hooks,
    make_run,
    open_buffer,
    read,
    rows_of,
    states,
    take,
    uids_of,
    write,
)

FAILED = {"reward": ..., "status": "failed", "error": "no"}


async def put_slot(entry: LiveRun, slot: int, reward: float | None, forks: int = 0, **changes: Any) -> list[str]:
    """The forks of a rollout, then its main sample, which has failed without a reward; what became of each."""
    told = {"instance_id": 7, "epoch": 0, "slot": slot, "rollout_id": f"r{slot}", **changes}
    ending = FAILED if reward is None else {"reward": reward}
    of_forks = {"reward": 1.0 if reward is None else reward}
    outcomes = [
        (await write(entry, uid=f"{told['rollout_id']}-f{fork}", fork=fork, **of_forks, **told)).outcome
        for fork in range(1, forks + 1)
    ]
    outcomes.append((await write(entry, uid=told["rollout_id"], **ending, **told)).outcome)
    return outcomes


async def test_forks_go_out_behind_their_main_sample_and_fill_no_slot(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=3))
        assert await put_slot(entry, 1, 1.0, forks=2) == ["member"] * 3
        assert await put_slot(entry, 0, 0.0, forks=1) == ["member"] * 2
        assert await read(entry, num_groups=1) is None, "two of three slots are filled, by five samples"
        await put_slot(entry, 2, 0.0)
        check_books(entry)
        (group,) = entry.buffer.groups.by_id.values()
        assert (group.row.num_samples, group.row.num_forks, group.slots) == (3, 3, {0, 1, 2})
        assert entry.buffer.groups.num_live_samples == 6
        batch = await take(entry, num_groups=1)
        assert uids_of(batch) == ["r1", "r1-f1", "r1-f2", "r0", "r0-f1", "r2"]
        assert batch.meta_info["total_samples"] == 3


async def test_a_rollout_counts_once_in_the_mean_of_its_group(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await put_slot(entry, 0, 1.0, forks=5)
        await put_slot(entry, 1, 0.0)
        rewards = {row["uid"]: row["reward"] for row in rows_of(await take(entry, num_groups=1))}
        assert rewards == pytest.approx({"r0": 1.0, "r1": -1.0, **{f"r0-f{fork}": 1.0 for fork in range(1, 6)}})


async def test_forks_of_a_rollout_that_failed_are_stored_and_not_delivered(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=3, min_valid_item_size_ratio=0.5))
        await put_slot(entry, 0, None, forks=2)
        await put_slot(entry, 1, 1.0)
        await put_slot(entry, 2, 0.0, forks=1)
        (group,) = entry.buffer.groups.by_id.values()
        assert (group.row.num_samples, group.row.num_failed) == (3, 1)
        batch = await take(entry, num_groups=1)
        # One of the two that are left is copied, to make three rows of it.
        assert uids_of(batch) == ["r1", "r2", "r2-f1", "r1"]
        stored = await store.samples("run-1", group.group_id)
        assert [(sample.row.fork, sample.row.rollout_outcome) for sample in stored[:3]] == [
            (1, "ok"),
            (2, "ok"),
            (0, "agent_failure"),
        ]


async def test_forks_that_an_earlier_execution_left_behind_stay_where_they_are(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        at = {"instance_id": 7, "epoch": 0, "slot": 0, "reward": 0.0}
        await write(entry, uid="lost-f1", fork=1, rollout_id="lost", weight_version=1, **at)
        await put_slot(entry, 0, 1.0, forks=1, weight_version=3)
        await put_slot(entry, 1, 0.0, weight_version=3)
        assert (await write(entry, uid="lost-f2", fork=2, rollout_id="lost", **at)).outcome == "surplus"
        batch = await take(entry, num_groups=1)
        assert uids_of(batch) == ["r0", "r0-f1", "r1"]
        assert entry.buffer.groups.by_id[batch.groups[0].group_id].row.num_forks == 2


async def test_weights_of_a_fork_that_is_not_delivered_make_no_group_stale(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(max_staleness=0))
        at = {"instance_id": 7, "epoch": 0, "slot": 0, "reward": 0.0}
        await write(entry, uid="lost-f1", fork=1, rollout_id="lost", weight_version=1, **at)
        await put_slot(entry, 0, 1.0, weight_version=3)
        await put_slot(entry, 1, 0.0, weight_version=3)
        await entry.group_judge.evaluate()
        entry.run.weight_version = 3
        await entry.buffer.save_run()
    async with open_buffer(store) as buffer:
        assert uids_of(await take(buffer.get("run-1"), num_groups=1)) == ["r0", "r1"]


async def test_forks_of_a_closed_group_are_late_and_known_ones_are_duplicates(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await put_slot(entry, 0, 1.0, forks=1)
        await put_slot(entry, 1, 0.0)
        await entry.group_judge.evaluate()
        at = {"instance_id": 7, "epoch": 0, "slot": 0, "rollout_id": "r0"}
        assert (await write(entry, uid="r0-f1", fork=1, **at)).is_duplicate
        assert (await write(entry, uid="r0-f2", fork=2, **at)).outcome == "late"
        assert (await write(entry, uid="far", fork=1, **at | {"slot": 9, "instance_id": 8})).outcome == "surplus"
        assert uids_of(await take(entry, num_groups=1)) == ["r0", "r0-f1", "r1"]
        assert states(entry) == {(7, 0): "acked"}


async def test_a_group_that_times_out_is_saved_by_slots_not_by_rows(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await put_slot(entry, 0, 1.0, forks=5)
        await put_slot(entry, 1, None, outcome="environment_failure")
        clock.advance(301)
        await buffer.tick()
        assert states(entry) == {(7, 0): "discarded: timed_out"}
        (group,) = entry.buffer.groups.by_id.values()
        assert group.row.detail == "1 of 4 samples arrived; failed: 1 environment_failure"


async def test_too_few_rollouts_are_left_although_rows_are_enough(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run(group_size=3, min_valid_item_size_ratio=1.0))
        await put_slot(entry, 0, 1.0, forks=4)
        await put_slot(entry, 1, 0.0)
        await put_slot(entry, 2, 7.0)
        assert await read(entry, num_groups=1) is None
        (group,) = entry.buffer.groups.by_id.values()
        told = "2 of 3 items were kept: its rewards are within [0, 7], reward_range is [0, 1]"
        assert (group.row.reason, group.row.detail) == ("filtered", told)


@pytest.mark.parametrize("is_leased", [False, True])
async def test_a_restart_and_a_rewind_bring_forks_back(store: Store, is_leased: bool) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run())
        await put_slot(entry, 0, 1.0, forks=2)
        await put_slot(entry, 1, 0.0)
        if is_leased:
            batch = await read(entry, num_groups=1, lease_s=100.0)
            assert batch is not None
            await entry.delivery.leases.ack(batch.batch_id)
            await checkpoint(entry.delivery.leases, 1, None)
    async with open_buffer(store) as buffer:
        entry = buffer.get("run-1")
        if is_leased:
            await rewind(entry.delivery.leases, None)
        (group,) = entry.buffer.groups.by_id.values()
        assert group.state is (GroupState.READY if is_leased else GroupState.OPEN)
        assert (group.row.num_samples, group.row.num_forks, group.slots) == (2, 2, {0, 1})
        check_books(entry)
        assert uids_of(await take(entry, num_groups=1)) == ["r0", "r0-f1", "r0-f2", "r1"]


LOOKS = """
TASK_TYPE = "task"
CONTRACT = "A"

def is_valid_group(group, min_valid_group_size, task_type):
    is_full = len(group[1]) >= min_valid_group_size
    return is_full, is_full

def normalize_group_data(group):
    instance_id, items = group
    return instance_id, [{**item, "beside": [other["uid"] for other in items]} for item in items]
"""


async def test_a_users_hooks_judge_main_samples_and_normalise_them_with_their_forks(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "looks_generator.py"
    path.write_text(LOOKS)
    async with open_buffer(store, make_hooks=file_hooks(path)) as buffer:
        entry = await buffer.add(make_run())
        await put_slot(entry, 0, 1.0, forks=3)
        assert await read(entry, num_groups=1) is None, "four samples of one rollout are no group of two"
        await put_slot(entry, 1, 1.0)
        batch = await read(entry, num_groups=1)
        assert batch is not None
        rows = rows_of(batch)
        assert rows[0]["beside"] == ["r0", "r0-f1", "r0-f2", "r0-f3", "r1"] == [row["uid"] for row in rows]
        entry.delivery.leases.release_soon(batch.batch_id)
        assert uids_of(await take(entry)) == ["r0", "r1"]
