"""A power cut at every single operation on the disk: what was acknowledged is there, in order, once."""

import asyncio
import random
from pathlib import Path

import pytest

from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed
from forebay.core.records.rows import Location, SampleRow
from tests.buffer.store.faulty_disks import LossyFiles
from tests.buffer.store.sample_entries import all_uids

SEGMENT_BYTES = 1_500
"""So small that most commits begin a segment."""
BURSTS = [1, 3, 1, 2, 5, 1, 4]
"""How many appends are made at once, one after the other."""


def make_sample(number: int) -> SampleRow:
    return SampleRow(
        run_id="run-1",
        uid=f"{number:04d}",
        instance_id=number,
        group_id=str(number // 4),
        epoch=0,
        slot=number % 4,
        outcome="member",
        reward=1.0,
        at_s=0.0,
        received_at_s=0.0,
    )


def body_of(uid: str) -> bytes:
    return uid.encode() * (20 + 17 * int(uid) % 200)


def append(store: JournalStore, number: int) -> "asyncio.Future[Location | None]":
    row = make_sample(number)
    return store.append([row], body_of(row.uid))


async def write_until_cut(store: JournalStore, first: int, acknowledged: list[str]) -> int:
    """Append in bursts until the power goes; the number behind the last one that was tried."""
    number = first
    for size in BURSTS:
        results = await asyncio.gather(*(append(store, number + i) for i in range(size)), return_exceptions=True)
        for i, result in enumerate(results):
            if isinstance(result, Location):
                acknowledged.append(f"{number + i:04d}")
            else:
                assert isinstance(result, StorageFailed)
        number += size
        if not all(isinstance(result, Location) for result in results):
            break
    return number


async def recovered(store: JournalStore) -> list[str]:
    samples = await store.load_samples("run-1")
    uids = [sample.row.uid for sample in samples]
    assert await store.read([sample.location for sample in samples]) == [body_of(uid) for uid in uids]
    assert sorted(uids) == sorted(await all_uids(store, "run-1"))
    return uids


def check(found: list[str], before: list[str], first: int, tried: int, acknowledged: list[str]) -> None:
    """``found`` is what was there before, then an unbroken beginning of what was tried, with all acknowledged."""
    new = [f"{number:04d}" for number in range(first, tried)]
    assert found[: len(before)] == before
    assert found[len(before) :] == new[: len(found) - len(before)]
    assert set(acknowledged) <= set(found)


async def run_with_cut(
    path: Path, cut_after: int, rng: random.Random | None, before: list[str], first: int
) -> tuple[list[str], int, bool]:
    """One life of a store that ends with a power cut: what it left, what was tried, and whether it came."""
    files = LossyFiles(path / "segments", cut_after=cut_after)
    acknowledged: list[str] = []
    tried = first
    try:
        async with JournalStore(path, segment_bytes=SEGMENT_BYTES, files=files) as store:
            tried = await write_until_cut(store, first, acknowledged)
    except StorageFailed:
        assert not files.has_power
    files.forget(rng)
    async with JournalStore(path, segment_bytes=SEGMENT_BYTES) as store:
        found = await recovered(store)
        check(found, before, first, tried, acknowledged)
        assert store.stats().num_quarantined == 0
    return found, tried, not files.has_power


@pytest.mark.parametrize("keeps_some_unsynced_bytes", [False, True])
async def test_power_cut_at_every_operation_of_a_new_store(tmp_path: Path, keeps_some_unsynced_bytes: bool) -> None:
    cut_after, is_cut = 0, True
    while is_cut:
        rng = random.Random(cut_after) if keeps_some_unsynced_bytes else None
        path = tmp_path / str(cut_after)
        found, _, is_cut = await run_with_cut(path, cut_after, rng, [], 0)
        async with JournalStore(path, segment_bytes=SEGMENT_BYTES) as store:
            await append(store, 9_999)
            assert await recovered(store) == [*found, "9999"]
        cut_after += is_cut
    assert cut_after > 3 * len(BURSTS), "rolls of segments must be among the operations"


async def test_power_cuts_one_after_the_other_on_the_same_store(tmp_path: Path) -> None:
    """Each life begins with what the cut left of the last one: mending is cut short as well."""
    rng, known, number = random.Random(7), list[str](), 0
    for _ in range(45):
        known, number, _ = await run_with_cut(tmp_path, rng.randrange(30), rng, known, number)
    assert len(known) > 100


async def test_power_cut_while_recovering_from_a_full_disk(tmp_path: Path) -> None:
    """The operations of ``recover`` are cut too, at each place."""
    for cut_after in range(40):
        path = tmp_path / str(cut_after)
        files = LossyFiles(path / "segments", cut_after=cut_after)
        acknowledged: list[str] = []
        try:
            async with JournalStore(path, segment_bytes=SEGMENT_BYTES, files=files) as store:
                acknowledged += [f"{n:04d}" for n in range(3) if await append(store, n)]
                store.append([make_sample(3)], _Unwritable())  # type: ignore[arg-type]
                with pytest.raises(StorageFailed):
                    await append(store, 4)
                await store.recover()
                acknowledged += [f"{n:04d}" for n in range(5, 8) if await append(store, n)]
        except StorageFailed:
            assert not files.has_power
        files.forget()
        async with JournalStore(path) as store:
            found = await recovered(store)
        assert found == sorted(set(found))
        assert set(acknowledged) <= set(found)
        assert not {"0003", "0004"} & set(found)


class _Unwritable:
    """A body that no file takes."""

    def __len__(self) -> int:
        return 10
