"""What ``Store`` promises about removing segments, asked of every implementation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.store.abc import Segment, Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.errors import StorageFailed
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import (
    BatchRow,
    CheckpointRow,
    GroupRow,
    Location,
    RunRow,
    SampleRow,
    StoredSample,
    TickRow,
)
from tests.buffer.store.sample_entries import all_uids

RUN = "run-1"
NUM_GROUPS = 12
READY = {"g1", "g7", "g11"}
"""The groups that are still needed; all others are acknowledged."""

Open = Callable[[], Store]


@pytest.fixture(params=["memory", "journal"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "memory":
        kept = MemoryStore(segment_bytes=1_000)
        return lambda: kept
    return lambda: JournalStore(tmp_path / "data", segment_bytes=3_000)


@pytest.fixture
async def store(open_store: Open) -> AsyncIterator[Store]:
    async with open_store() as store:
        await fill(store)
        yield store


def make_sample(number: int, **changes: Any) -> SampleRow:
    group = number // 4
    fields: dict[str, Any] = {
        "run_id": RUN,
        "uid": f"u{number:03d}",
        "instance_id": f"i{group}",
        "group_id": f"g{group}",
        "epoch": 2,
        "slot": number % 4,
        "outcome": "member",
        "reward": None if number % 5 == 0 else number / 4,
        "at_s": float(number),
        "received_at_s": 1000.0 + number,
        "error": "boom" if number % 5 == 0 else "",
        "reward_start": 3,
        "reward_end": 5,
        "rollout_id": f"r{number}",
        "oldest_version": number if number % 2 else None,
        "group_number": group + 1,
        "fork": number % 3,
        "rollout_outcome": "truncated" if number % 2 else "ok",
    }
    return SampleRow(**{**fields, **changes})


def body_of(uid: str) -> bytes:
    return uid.encode() * 30


def make_group(number: int) -> GroupRow:
    group_id = f"g{number}"
    state = GroupState.READY if group_id in READY else GroupState.ACKED
    return GroupRow(
        run_id=RUN,
        group_id=group_id,
        instance_id=f"i{number}",
        epoch=2,
        state=state,
        opened_s=4.0 * number,
        number=number + 1,
        num_samples=4,
        batch_id="" if group_id in READY else "b1",
    )


async def fill(store: Store) -> None:
    run = RunRow(run_id=RUN, name="n", task_type="t", state="s", created_at_s=1.0, active_s=2.0, document={"a": [1]})
    batch = BatchRow(run_id=RUN, batch_id="b1", number=1, state=BatchState.ACKED, group_ids=["g0"], checkpoint_step=3)
    await store.append([run, batch, CheckpointRow(run_id=RUN, step=3, at_s=5.0)])
    for number in range(4 * NUM_GROUPS):
        row = make_sample(number)
        await store.append([row], body_of(row.uid))
        if number % 4 == 3:
            await store.append([make_group(number // 4)])
    for uid, changes in (("late", {"outcome": "late", "slot": -1}), ("stray", {"group_id": "nobody's"})):
        await store.append([make_sample(5, uid=uid, **{"outcome": "surplus", "at_s": 99.0, **changes})], body_of(uid))
    await store.append([TickRow(run_id=RUN, active_s=123.5)])


async def answers(store: Store) -> dict[str, Any]:
    """Everything that is known, but for bodies and where they are."""
    keys = [f"g{number}" for number in range(NUM_GROUPS)] + ["nobody's"]
    return {
        "runs": await store.load_runs(),
        "groups": await store.load_groups(RUN),
        "page": await store.groups(RUN, after="g4", limit=3),
        "batches": await store.load_batches(RUN),
        "checkpoints": await store.load_checkpoints(RUN),
        "uids": sorted(await all_uids(store, RUN)),
        "live": sorted(sample.row.uid for sample in await store.load_samples(RUN)),
        "samples": {key: told(found) for key, found in (await store.samples_of(RUN, keys)).items()},
    }


def told(samples: list[StoredSample]) -> list[tuple[SampleRow, int]]:
    """Samples as they are shown, in their order."""
    return [(sample.row, sample.location.length) for sample in samples]


async def bodies_there(store: Store) -> dict[str, list[str]]:
    """By group, the samples whose body is still there; each is compared with what was written."""
    found = {}
    for number in range(NUM_GROUPS):
        samples = [s for s in await store.samples(RUN, f"g{number}") if store.holds(s.location)]
        bodies = await store.read([sample.location for sample in samples])
        assert bodies == [body_of(sample.row.uid) for sample in samples]
        found[f"g{number}"] = [sample.row.uid for sample in samples]
    return found


def moved_from(segment: Segment) -> list[tuple[str, str]]:
    return [(each.run_id, each.group_id) for each in segment.groups if each.group_id in READY]


async def drop(store: Store, segment: Segment) -> None:
    store.begin_removal(segment.number)
    await store.clear(segment.number, moved_from(segment))
    await store.remove(segment.number)


async def test_segments_tell_what_bodies_are_in_them(store: Store) -> None:
    segments = await store.segments()
    assert len(segments) > 3
    assert [segment.number for segment in segments] == sorted(segment.number for segment in segments)
    located: dict[tuple[int, str], list[StoredSample]] = {}
    for group_id in (*(f"g{number}" for number in range(NUM_GROUPS)), "nobody's"):
        for sample in await store.samples(RUN, group_id):
            located.setdefault((sample.location.segment, sample.row.group_id), []).append(sample)
    for segment in segments:
        for each in segment.groups:
            samples = located.pop((segment.number, each.group_id), [])
            assert each.num_bytes == sum(sample.location.length for sample in samples)
            assert each.newest_at_s == max(sample.row.received_at_s for sample in samples)
    last = max(segment.number for segment in segments) + 1
    assert {number for number, _ in located} <= {last}, "only what is in the last segment is left out"


async def test_removing_every_segment_takes_nothing_but_bodies_that_nobody_needs(
    store: Store, open_store: Open
) -> None:
    before, stats = await answers(store), store.stats()
    live_before = [sample.row for sample in await store.load_samples(RUN)]
    dropped = await store.segments()
    for segment in dropped:
        await drop(store, segment)
        assert await answers(store) == before
    there = await bodies_there(store)
    assert {key: len(there[key]) for key in READY} == {"g1": 5, "g7": 4, "g11": 4}
    assert any(not uids for uids in there.values())
    assert [sample.row for sample in await store.load_samples(RUN)] == live_before
    assert store.stats().num_bytes < stats.num_bytes
    assert not {segment.number for segment in dropped} & {segment.number for segment in await store.segments()}
    await check_after_restart(open_store, store, before, there)


async def check_after_restart(open_store: Open, store: Store, before: Any, there: dict[str, list[str]]) -> None:
    """The same answers when it is opened again, also with an index that is made anew."""
    if not isinstance(store, JournalStore):
        return
    location = Path(store.stats().location)
    await store.__aexit__(None, None, None)
    for lose_index in (False, True):
        if lose_index:
            (location / "index.sqlite").unlink()
        async with open_store() as again:
            assert await answers(again) == before
            assert await bodies_there(again) == there
            assert (again.stats().num_quarantined, again.stats().num_torn_bytes) == (0, 0)
    await store.__aenter__()


async def test_columns_that_were_written_again_survive_the_removal_of_that_segment_too(
    store: Store, open_store: Open
) -> None:
    before = await answers(store)
    for _ in range(4):
        for segment in await store.segments():
            await drop(store, segment)
        await store.append([make_sample(400, uid="filler", group_id="filler")], b"x" * 4_000)
        before["uids"] = sorted({*before["uids"], "filler"})
        before["groups"] = await store.load_groups(RUN)
        before["live"] = sorted({*before["live"], "filler"})
        before["runs"] = await store.load_runs()
        assert await answers(store) == before
    there = await bodies_there(store)
    assert {key: len(there[key]) for key in READY} == {"g1": 5, "g7": 4, "g11": 4}
    await check_after_restart(open_store, store, before, there)


async def test_bodies_are_not_held_from_the_moment_on_at_which_their_segment_is_condemned(store: Store) -> None:
    segment, other = (await store.segments())[:2]
    locations = [sample.location for key in ("g0", "g1", "g2") for sample in await store.samples(RUN, key)]
    mine = [location for location in locations if location.segment == segment.number]
    assert mine
    assert all(store.holds(location) for location in locations)
    store.begin_removal(segment.number)
    assert not any(store.holds(location) for location in mine)
    assert await store.read(mine)
    store.cancel_removal(segment.number)
    assert all(store.holds(location) for location in mine)
    await drop(store, segment)
    store.cancel_removal(segment.number)
    assert not any(store.holds(location) for location in mine)
    with pytest.raises(StorageFailed, match="cannot be read"):
        await store.read(mine[:1])
    assert any(store.holds(location) for location in locations if location.segment == other.number)


async def test_clearing_twice_changes_nothing(store: Store, open_store: Open) -> None:
    before = await answers(store)
    segment = (await store.segments())[0]
    store.begin_removal(segment.number)
    for _ in range(3):
        await store.clear(segment.number, moved_from(segment))
        assert await answers(store) == before
    await store.remove(segment.number)
    await check_after_restart(open_store, store, before, await bodies_there(store))


async def test_what_changes_while_a_segment_is_cleared_stays_changed(store: Store, open_store: Open) -> None:
    """A value that is written again must not replace a newer one."""
    segments = await store.segments()
    changed: list[GroupRow] = []
    for segment in segments:
        store.begin_removal(segment.number)
        clearing = asyncio.create_task(store.clear(segment.number, moved_from(segment)))
        while not clearing.done():
            number = len(changed) % NUM_GROUPS
            row = make_group(number)
            row.num_deliveries = len(changed) + 1
            changed.append(row)
            await store.append([row, TickRow(run_id=RUN, active_s=200.0 + len(changed))])
            late = make_sample(4 * number, uid=f"late-{len(changed)}", outcome="late", at_s=1.0)
            await store.append([late], body_of(late.uid))
            await asyncio.sleep(0)
        await clearing
        await store.remove(segment.number)
    newest = {row.group_id: row.num_deliveries for row in changed}
    found = {row.group_id: row.num_deliveries for row in await store.load_groups(RUN) if row.num_deliveries}
    assert found == newest
    [run] = await store.load_runs()
    assert run.active_s == 200.0 + len(changed)
    uids = await all_uids(store, RUN)
    assert {f"late-{number + 1}" for number in range(len(changed))} <= uids
    await check_after_restart(open_store, store, await answers(store), await bodies_there(store))


async def test_num_row_bytes_is_far_less_than_a_segment_of_large_bodies(open_store: Open) -> None:
    async with open_store() as store:
        await store.append([make_group(0)])
        for number in range(8):
            await store.append([make_sample(number)], b"x" * 10_000)
        for segment in await store.segments():
            assert 0 <= await store.num_row_bytes(segment.number) < segment.num_bytes / 5


def location_in(segment: int) -> Location:
    return Location(segment, 0, 1)


async def test_nothing_is_held_in_segments_that_never_were(store: Store) -> None:
    assert not store.holds(location_in(99))


PARTS: dict[str, dict[str, Any]] = {
    "\0aa": {"outcome": "part", "slot": -1, "at_s": 0.0},
    "\0bb": {"outcome": "part", "slot": -1, "at_s": 0.1},
    "first": {"at_s": 0.2},
}


async def test_parts_stay_with_their_segment_if_a_group_is_moved_without_them(open_store: Open) -> None:
    async with open_store() as store:
        rows = {uid: make_sample(4, uid=uid, **changes) for uid, changes in PARTS.items()}
        for uid, row in rows.items():
            await store.append([row], body_of(uid) * 9)
        await fill(store)
        first = (await store.segments())[0]
        parts = [each for each in first.groups if each.group_id == "g1"]
        assert [each.part_bytes for each in parts] == [len(body_of("\0aa")) * 9 + len(body_of("\0bb")) * 9]
        before = await answers(store)
        assert before["live"][:2] == ["\0aa", "\0bb"]
        assert not {"\0aa", "\0bb"} & set(before["uids"])
        store.begin_removal(first.number)
        await store.clear(first.number, [(RUN, "g1")], {(RUN, "g1")})
        await store.remove(first.number)
        assert await answers(store) == before
        found = {sample.row.uid: store.holds(sample.location) for sample in await store.samples(RUN, "g1")}
        assert [found[uid] for uid in ("\0aa", "\0bb", "first")] == [False, False, True]
