"""A power cut at every single operation while segments are removed: nothing but bodies that nobody needs is gone."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed
from forebay.core.records.rows import SampleRow
from tests.buffer.store.faulty_disks import LossyFiles
from tests.buffer.store.sample_entries import all_uids
from tests.contracts.test_store_retention import RUN, answers, bodies_there, drop, fill, make_sample, moved_from

SEGMENT_BYTES = 6_000
NEEDED = {"g1": 5, "g7": 4, "g11": 4}


def open_store(path: Path, files: LossyFiles | None = None) -> JournalStore:
    return JournalStore(path, segment_bytes=SEGMENT_BYTES, files=files)


@pytest.fixture
async def filled(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "filled"
    async with open_store(path) as store:
        await fill(store)
        assert len(await store.segments()) > 2
        return path, await answers(store)


async def clear_until_cut(path: Path, files: LossyFiles) -> None:
    try:
        async with open_store(path, files) as store:
            for segment in await store.segments():
                store.begin_removal(segment.number)
                for _ in range(2):  # the second time, everything is there already
                    await store.clear(segment.number, moved_from(segment))
                await store.remove(segment.number)
    except StorageFailed:
        assert not files.has_power


async def check(path: Path, expected: dict[str, Any]) -> None:
    async with open_store(path) as store:
        assert await answers(store) == expected
        there = await bodies_there(store)
        assert {key: len(there[key]) for key in NEEDED} == NEEDED
        assert store.stats().num_quarantined == 0


def copy(source: Path, target: Path, index: Path | None) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("index.sqlite*", "lock"))
    if index is not None:
        for each in index.glob("index.sqlite*"):
            shutil.copy(each, target)
    return target


@pytest.mark.soak
@pytest.mark.parametrize("keeps_some_unsynced_bytes", [False, True])
async def test_power_cut_at_every_operation(
    tmp_path: Path, filled: tuple[Path, dict[str, Any]], keeps_some_unsynced_bytes: bool
) -> None:
    """What is left is opened with the index as the cut left it, as it was before, and without one."""
    path, expected = filled
    num_cuts = 0
    while True:
        work = copy(path, tmp_path / f"cut-{num_cuts}", path)
        files = LossyFiles(work / "segments", cut_after=num_cuts)
        await clear_until_cut(work, files)
        files.forget(random.Random(num_cuts) if keeps_some_unsynced_bytes else None)
        for number, index in enumerate((path, None, work)):
            await check(copy(work, tmp_path / f"cut-{num_cuts}-{number}", index), expected)
        if files.has_power:
            break
        await check_second_attempt(work, expected)
        num_cuts += 1
    assert num_cuts > 20


async def check_second_attempt(path: Path, expected: dict[str, Any]) -> None:
    """What was begun can be done to the end."""
    async with open_store(path) as store:
        segments = await store.segments()
        for segment in segments:
            await drop(store, segment)
        assert {segment.number for segment in segments}.isdisjoint(s.number for s in await store.segments())
    (path / "index.sqlite").unlink()
    await check(path, expected)


async def test_power_cuts_one_after_the_other(tmp_path: Path, filled: tuple[Path, dict[str, Any]]) -> None:
    path, expected = filled
    rng = random.Random(5)
    for number in range(25):
        files = LossyFiles(path / "segments", cut_after=rng.randrange(20))
        await clear_until_cut(path, files)
        files.forget(rng)
        await check(path, expected)
        if number % 4 == 0:
            await grow(path, expected, number)


async def grow(path: Path, expected: dict[str, Any], number: int) -> None:
    """More to clear, in new segments."""
    async with open_store(path) as store:
        for each in range(8):
            row: SampleRow = make_sample(1_000 + number, uid=f"more-{number}-{each}", group_id="more", outcome="late")
            await store.append([row], b"x" * 900)
            expected["uids"] = sorted([*expected["uids"], row.uid])
        expected["runs"] = await store.load_runs()
        assert sorted(await all_uids(store, RUN)) == expected["uids"]
