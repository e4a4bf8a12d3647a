"""On a full disk, what has no body goes on by the reserve, and nothing that was refused is in the log."""

import asyncio
import errno
from pathlib import Path

import pytest

from forebay.buffer.store import log_writer
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.reserve import PART_BYTES
from forebay.core.errors import StorageFailed
from forebay.core.group import GroupState
from forebay.core.records.rows import GroupRow
from tests.buffer.store.faulty_disks import SmallDisk
from tests.buffer.store.test_journal_failures import make_sample, put, uids_of

RESERVE = 3 * PART_BYTES


def make_group(number: int) -> GroupRow:
    return GroupRow(
        run_id="run-1", group_id=f"g{number}", instance_id=number, epoch=0, state=GroupState.ACKED, opened_s=1.0
    )


def make_store(path: Path, files: SmallDisk, reserve_bytes: int = RESERVE) -> JournalStore:
    return JournalStore(path, segment_bytes=1 << 16, reserve_bytes=reserve_bytes, files=files)


def reserved(path: Path) -> int:
    return (path / "reserve").stat().st_size


async def test_a_full_disk_takes_rows_without_bodies_and_nothing_else(tmp_path: Path) -> None:
    files = SmallDisk(tmp_path)
    async with make_store(tmp_path, files) as store:
        await put(store, "first")
        assert reserved(tmp_path) == RESERVE
        files.size = RESERVE + store.stats().num_bytes
        with pytest.raises(StorageFailed, match="No space left"):
            await put(store, "refused")
        await store.recover()
        assert store.is_on_reserve
        with pytest.raises(StorageFailed, match="the disk is full"):
            store.check_room()
        # More than a segment, and more than one part of the reserve.
        for start in range(0, 6_000, 1_000):
            await asyncio.gather(*(store.append([make_group(start + number)]) for number in range(1_000)))
        assert store.stats().num_segments > 2
        assert reserved(tmp_path) < RESERVE - PART_BYTES
        assert await uids_of(store) == ["first"]
        assert len(await store.load_groups("run-1")) == 1 + 6_000


async def test_the_reserve_is_filled_again_once_there_is_room(tmp_path: Path) -> None:
    files = SmallDisk(tmp_path)
    async with make_store(tmp_path, files) as store:
        files.size = RESERVE
        await store.append([make_group(1)])
        assert (store.is_on_reserve, reserved(tmp_path)) == (True, RESERVE - PART_BYTES)
        files.size = None
        async with asyncio.timeout(20):
            while store.is_on_reserve:  # noqa: ASYNC110 - the writer's thread looks now and then
                await asyncio.sleep(0.01)
        store.check_room()
        assert reserved(tmp_path) == RESERVE
        await store.append([make_sample("next")], b"next")


async def test_a_body_that_was_on_its_way_when_the_disk_was_found_full_takes_nothing_of_the_reserve(
    tmp_path: Path,
) -> None:
    files = SmallDisk(tmp_path)
    async with make_store(tmp_path, files) as store:
        files.size = RESERVE
        await store.append([make_group(1)])
        assert store.is_on_reserve
        with pytest.raises(StorageFailed, match="No space left"):
            await put(store, "on its way")
        await store.recover()
        await store.append([make_group(2)])
        assert await uids_of(store) == []


async def test_a_reserve_that_is_used_up_refuses_and_recovers(tmp_path: Path) -> None:
    files = SmallDisk(tmp_path)
    async with make_store(tmp_path, files, PART_BYTES // 64) as store:
        files.size = PART_BYTES // 64
        stored = [store.append([make_group(number)]) for number in range(1_000)]
        await asyncio.gather(*stored, return_exceptions=True)
        assert any(isinstance(future.exception(), StorageFailed) for future in stored)
        with pytest.raises(StorageFailed, match="No space left"):
            await store.recover()
        files.size = None
        await store.recover()
        await store.append([make_group(1_000)])
    async with make_store(tmp_path, files) as store:
        kept = [number for number, future in enumerate(stored) if future.exception() is None]
        assert [group.instance_id for group in await store.load_groups("run-1")] == [*kept, 1_000]


async def test_the_reserve_follows_its_setting(tmp_path: Path) -> None:
    files = SmallDisk(tmp_path)
    for reserve_bytes in (PART_BYTES, 2 * PART_BYTES, 5_000):
        async with make_store(tmp_path, files, reserve_bytes):
            assert reserved(tmp_path) == reserve_bytes
    async with make_store(tmp_path, files, 0):
        assert not (tmp_path / "reserve").exists()
    files.size = PART_BYTES
    async with make_store(tmp_path, files):  # no room for it: the server starts all the same
        assert not (tmp_path / "reserve").exists() or reserved(tmp_path) == 0


async def test_a_disk_that_cannot_be_asked_for_room_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    files = SmallDisk(tmp_path)
    async with make_store(tmp_path, files) as store:
        files.size = RESERVE
        await store.append([make_group(1)])
        with monkeypatch.context() as patch:
            patch.setattr(log_writer, "LOOK_S", 0.0)
            patch.setattr(files, "free_bytes", refuse)
            with pytest.raises(StorageFailed, match="Input/output error"):
                await store.append([make_group(2)])
        await store.recover()
        await store.append([make_group(3)])
        assert [group.instance_id for group in await store.load_groups("run-1")] == [1, 3]
