"""What ``Store`` promises, asked of every implementation."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.store.abc import Edited, Slice, Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.errors import GroupNotFound, InvalidInput, StorageFailed
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import BatchRow, CheckpointRow, GroupRow, Location, RunRow, SampleRow, TickRow
from tests.buffer.store.faulty_disks import LossyFiles
from tests.buffer.store.sample_entries import all_uids


def make_run(run_id: str = "run-1", **changes: Any) -> RunRow:
    fields = {"name": "", "task_type": "math", "state": "running", "created_at_s": 1.0, "active_s": 0.0, "document": {}}
    return RunRow(run_id=run_id, **{**fields, **changes})


def make_group(group_id: str = "g", **changes: Any) -> GroupRow:
    fields: dict[str, Any] = {"instance_id": 1, "epoch": 0, "state": GroupState.OPEN, "opened_s": 0.0}
    return GroupRow(**{"run_id": "run-1", "group_id": group_id, **fields, **changes})


def make_sample(uid: str = "u", **changes: Any) -> SampleRow:
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "instance_id": 1,
        "group_id": "g",
        "epoch": 0,
        "slot": 0,
        "outcome": "member",
        "reward": 0.5,
        "at_s": 1.0,
        "received_at_s": 2.0,
    }
    return SampleRow(uid=uid, **{**fields, **changes})


def make_batch(number: int = 1, **changes: Any) -> BatchRow:
    fields: dict[str, Any] = {"batch_id": f"b{number}", "state": BatchState.LEASED, "group_ids": ["g"]}
    return BatchRow(**{"run_id": "run-1", "number": number, **fields, **changes})


def make_store(kind: str, path: Path) -> Store:
    if kind == "memory":
        return MemoryStore()
    if kind == "journal":
        return JournalStore(path)
    (path / "segments").mkdir(parents=True)
    return JournalStore(path, segment_bytes=2_000, files=LossyFiles(path / "segments"))


@pytest.fixture(params=["memory", "journal", "journal on a lossy disk"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with make_store(request.param, tmp_path / "data") as opened:
        yield opened


async def put(store: Store, *uids: str, **changes: Any) -> list[Location | None]:
    return [await store.append([make_sample(uid, **changes)], uid.encode()) for uid in uids]


async def uids_of(store: Store, run_id: str = "run-1") -> list[str]:
    return [sample.row.uid for sample in await store.load_samples(run_id)]


async def test_body_comes_back_as_the_bytes_that_arrived(store: Store) -> None:
    bodies = [b"", b"\x00\xff" * 40, b'{"a": 1}', b"x" * 70_000]
    locations = [await store.append([make_sample(str(i))], body) for i, body in enumerate(bodies)]
    assert None not in locations
    found = [location for location in locations if location is not None]
    assert await store.read(found) == bodies
    assert await store.read(found[::-1] + found[:1]) == [*bodies[::-1], bodies[0]]


async def test_stretches_of_bodies_can_be_read(store: Store) -> None:
    bodies = [bytes(range(100)), b"x" * 70_000 + b"y"]
    found = [at for i, body in enumerate(bodies) if (at := await store.append([make_sample(str(i))], body)) is not None]
    wanted = [Slice(found[1], 69_999, 70_001), Slice(found[0], 0, 4), Slice(found[0], 7, 7), Slice(found[0], 50, 100)]
    assert await store.read_slices(wanted) == [b"xy", bytes(range(4)), b"", bytes(range(50, 100))]


async def test_bodies_are_gathered_with_edits_and_commas(store: Store) -> None:
    first, second = [await store.append([make_sample(uid)], uid.encode()) for uid in ("body-one", "body-two")]
    assert first is not None
    assert second is not None
    pieces = [Edited(second, 5, 8, b"2"), b"between", Edited(first, 0, 0, b""), Edited(second, 0, 8, b"")]
    assert await store.gather(pieces) == b"body-2,between,body-one,,"
    assert await store.gather([]) == b""


async def test_body_may_be_a_memoryview(store: Store) -> None:
    location = await store.append([make_sample()], memoryview(b"--body--")[2:6])
    assert location is not None
    assert await store.read([location]) == [b"body"]


async def test_entry_without_a_sample_has_no_location(store: Store) -> None:
    assert await store.append([make_run(), make_group()]) is None


async def test_reading_what_was_never_written_is_told(store: Store) -> None:
    await put(store, "u")
    with pytest.raises(StorageFailed, match="cannot be read"):
        await store.read([Location(1, 10_000_000, 5)])


async def test_rows_come_back_equal(store: Store) -> None:
    run = make_run(document={"a": [1, None, {"b": 2**80}]}, name="n", active_s=3.5)
    group = make_group(
        state=GroupState.LEASED, order=4, reason="r", detail="d\n", is_salvaged=True, last_sample_s=2.0, surplus_due=1
    )
    sample = make_sample(reward=None, error="boom", at_s=3.0)
    await store.append([run, group])
    location = await store.append([sample], b"body")
    assert await store.load_runs() == [run]
    assert await store.load_groups("run-1") == [group]
    [found] = await store.load_samples("run-1")
    assert (found.row, found.location) == (sample, location)


@pytest.mark.parametrize("instance_id", [1, "1", "é\x00☃", 2**200, -(2**70), '"1"', ""])
async def test_instance_id_keeps_its_type_and_size(store: Store, instance_id: str | int) -> None:
    await store.append([make_group(instance_id=instance_id)])
    await put(store, "u", instance_id=instance_id)
    [group], [sample] = await store.load_groups("run-1"), await store.load_samples("run-1")
    assert (group.instance_id, sample.row.instance_id) == (instance_id, instance_id)
    assert type(sample.row.instance_id) is type(instance_id)


async def test_a_row_replaces_the_row_of_the_same_key(store: Store) -> None:
    await store.append([make_run(state="running"), make_group("a"), make_group("b")])
    await put(store, "u", "v")
    await store.append([make_run(state="ended"), make_group("a", state=GroupState.DISCARDED, reason="failed")])
    await put(store, "u", group_id="b", slot=7)
    assert [run.state for run in await store.load_runs()] == ["ended"]
    assert [(g.group_id, g.state) for g in await store.load_groups("run-1")][:2] == [("a", "discarded"), ("b", "open")]
    assert [(s.row.uid, s.row.slot) for s in await store.samples("run-1", "b")] == [("u", 7)]
    assert sorted(await all_uids(store, "run-1")) == ["u", "v"]


async def test_rows_changed_by_the_caller_after_append_are_stored_as_they_were(store: Store) -> None:
    group = make_group(reason="before")
    done = store.append([group])
    group.reason = "after"
    await done
    [found] = await store.load_groups("run-1")
    assert found.reason == "before"
    found.reason = "changed outside"
    assert [g.reason for g in await store.load_groups("run-1")] == ["before"]


async def test_active_seconds_are_raised_by_rows_and_replaced_by_ticks(store: Store) -> None:
    async def active() -> float:
        [run] = await store.load_runs()
        return run.active_s

    await store.append([make_run(active_s=5.0)])
    await put(store, "u", at_s=7.0)
    assert await active() == 7.0
    await store.append([make_run(active_s=6.0)])
    await put(store, "v", at_s=2.0)
    assert await active() == 7.0
    await store.append([TickRow(run_id="run-1", active_s=6.5)])
    assert await active() == 6.5
    store.append([TickRow(run_id="run-1", active_s=9.0)])
    await put(store, "w", at_s=8.0)
    assert await active() == 9.0


async def test_only_a_member_opens_its_group(store: Store) -> None:
    await put(store, "late", group_id="x", outcome="late")
    await put(store, "surplus", group_id="y", outcome="surplus")
    await put(store, "first", "second", group_id="z", instance_id="i", epoch=3, at_s=4.0)
    [group] = await store.load_groups("run-1")
    assert group == make_group("z", instance_id="i", epoch=3, opened_s=4.0)


async def test_a_member_does_not_reopen_a_group(store: Store) -> None:
    await store.append([make_group("a", state=GroupState.READY, order=3)])
    await put(store, "u", group_id="a")
    assert [(g.state, g.order) for g in await store.load_groups("run-1")] == [("ready", 3)]


async def test_only_members_of_live_groups_are_loaded(store: Store) -> None:
    for state in GroupState:
        await store.append([make_group(state, state=state)])
        await put(store, f"{state}-member", group_id=state)
        await put(store, f"{state}-late", group_id=state, outcome="late")
    assert await uids_of(store) == ["open-member", "ready-member", "leased-member"]
    assert len(await all_uids(store, "run-1")) == 2 * len(GroupState)
    assert [s.row.uid for s in await store.samples("run-1", "acked")] == ["acked-member", "acked-late"]


async def test_each_live_group_has_its_own_part_of_the_same_name(store: Store) -> None:
    for group_id in "ab":
        await store.append([make_group(group_id)])
        await put(store, "\0part", group_id=group_id, outcome="part")
    assert [sample.row.group_id for sample in await store.load_samples("run-1")] == ["a", "b"]


async def test_everything_keeps_its_order(store: Store) -> None:
    names = [f"{i * 7919 % 101:03d}" for i in range(101)]
    for name in names:
        store.append([make_run(f"run-{name}")])
        store.append([make_sample(name, group_id=name)], b"x")
    assert [run.run_id for run in await store.load_runs()] == [f"run-{name}" for name in names]
    assert await uids_of(store) == names
    assert [group.group_id for group in await store.load_groups("run-1")] == names


async def test_batches_and_checkpoints_come_back_equal_and_in_order(store: Store) -> None:
    second = make_batch(
        2,
        state=BatchState.ACKED,
        group_ids=["h", "g"],
        reported_ids=["r"],
        stale_ids=["g"],
        num_rows=9,
        request_id="é",
        step=2**53,
        checkpoint_step=3,
        lease_s=0.5,
        leased_at_s=7.25,
        is_self_acking=True,
        reason="r",
        meta_info={"finished_groups": [1, "1", 2**80], "avg_reward": 0.1, "x": None},
    )
    later = CheckpointRow(run_id="run-1", step=10, at_s=2.0)
    await store.append([second, later])
    await store.append([make_batch(1), CheckpointRow(run_id="run-1", step=3, at_s=1.0), make_run()])
    assert await store.load_batches("run-1") == [make_batch(1), second]
    await store.append(
        [make_batch(1, state=BatchState.REVOKED), CheckpointRow(run_id="run-1", step=3, at_s=1.0, is_forgotten=True)]
    )
    assert [row.state for row in await store.load_batches("run-1")] == ["revoked", "acked"]
    assert [(row.step, row.is_forgotten) for row in await store.load_checkpoints("run-1")] == [(3, True), (10, False)]
    assert await store.load_batches("run-2") == await store.load_checkpoints("run-2") == []


async def test_batches_are_loaded_in_pages_and_found_by_their_ids(store: Store) -> None:
    rows = [make_batch(number) for number in range(1, 8)]
    await store.append([*reversed(rows), make_batch(3, run_id="run-2")])
    assert await store.load_batches("run-1", after=2, limit=3) == rows[2:5]
    assert await store.load_batches("run-1", after=5, limit=3) == rows[5:]
    assert await store.load_batches("run-1", after=7, limit=3) == []
    store.append([changed := make_batch(4, state=BatchState.ACKED)])
    wanted = [rows[5].batch_id, rows[3].batch_id, "batch-none"]
    found = await store.find_batches("run-1", wanted)
    assert sorted(found, key=lambda row: row.number) == [changed, rows[5]], "as it was last appended"
    assert await store.find_batches("run-none", wanted) == await store.find_batches("run-1", []) == []


async def test_samples_of_many_groups_are_found_together(store: Store) -> None:
    for uid in range(6):
        await put(store, str(uid), group_id=f"g{uid % 3}")
    found = await store.samples_of("run-1", ["g2", "g0", "none"])
    assert {key: [s.row.uid for s in samples] for key, samples in found.items()} == {
        "g2": ["2", "5"],
        "g0": ["0", "3"],
        "none": [],
    }


async def test_runs_do_not_see_each_other(store: Store) -> None:
    await put(store, "u", "v")
    await put(store, "u", run_id="run-2")
    assert await uids_of(store) == ["u", "v"]
    assert await uids_of(store, "run-2") == ["u"]
    assert [g.run_id for g in await store.groups("run-2")] == ["run-2"]
    assert await uids_of(store, "run-3") == []


async def test_groups_are_paged_in_order_of_opening(store: Store) -> None:
    for i in range(7):
        await store.append([make_group(f"g{6 - i}", state=GroupState.READY if i % 2 else GroupState.OPEN)])
    pages = [
        [g.group_id for g in await store.groups("run-1", after=after, limit=3)] for after in ("", "g4", "g1", "g0")
    ]
    assert pages == [["g6", "g5", "g4"], ["g3", "g2", "g1"], ["g0"], []]
    assert [g.group_id for g in await store.groups("run-1", state="ready", after="g5", limit=2)] == ["g3", "g1"]
    with pytest.raises(GroupNotFound, match="nowhere"):
        await store.groups("run-1", after="nowhere")


async def test_queries_see_every_append_called_before(store: Store) -> None:
    for i in range(50):
        store.append([make_sample(str(i))], b"x")
        assert len(await uids_of(store)) == i + 1


async def test_a_cancelled_future_does_not_undo_the_append(store: Store) -> None:
    store.append([make_sample()], b"x").cancel()
    assert await uids_of(store) == ["u"]


async def test_many_appends_at_once_are_all_there(store: Store) -> None:
    count = 3_000
    futures = [store.append([make_sample(f"{i:05d}", group_id=str(i // 8))], b"%d" % i) for i in range(count)]
    locations = [location for location in await asyncio.gather(*futures) if location is not None]
    assert await store.read(locations) == [b"%d" % i for i in range(count)]
    assert await uids_of(store) == [f"{i:05d}" for i in range(count)]


@pytest.mark.parametrize("field", ["epoch", "slot"])
async def test_integers_beyond_64_bits_are_refused_by_name(store: Store, field: str) -> None:
    with pytest.raises(InvalidInput, match=field) as caught:
        store.append([make_sample(**{field: 2**63})], b"x")
    assert caught.value.field == field
    assert await all_uids(store, "run-1") == set()


async def test_a_sample_row_and_a_body_need_each_other(store: Store) -> None:
    with pytest.raises(ValueError, match="one sample row and its body"):
        store.append([make_sample()])
    with pytest.raises(ValueError, match="one sample row and its body"):
        store.append([make_group()], b"x")
    with pytest.raises(ValueError, match="one sample row and its body"):
        store.append([make_sample("a"), make_sample("b")], b"x")


async def test_recover_without_a_failure_changes_nothing(store: Store) -> None:
    await put(store, "u")
    await store.recover()
    await put(store, "v")
    assert await uids_of(store) == ["u", "v"]


async def test_stats_grow_with_what_is_stored(store: Store) -> None:
    before = store.stats()
    await put(store, "u" * 1_000)
    after = store.stats()
    assert after.num_bytes >= before.num_bytes + 1_000
    assert (after.num_quarantined, after.num_torn_bytes) == (0, 0)
    assert after.num_segments >= 1
    assert after.location


async def test_what_was_stored_is_there_after_leaving_and_entering_again(tmp_path: Path) -> None:
    for kind in ("memory", "journal"):
        store = make_store(kind, tmp_path / kind)
        async with store:
            await put(store, "u", "v")
        async with store:
            await put(store, "w")
            assert await uids_of(store) == ["u", "v", "w"]
