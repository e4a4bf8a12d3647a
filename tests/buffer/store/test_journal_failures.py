"""When the disk refuses: nothing is acknowledged that was not stored, and writing resumes."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed
from forebay.core.records.rows import Location, SampleRow
from tests.buffer.store.faulty_disks import RefusingFiles
from tests.buffer.store.sample_entries import all_uids


def make_sample(uid: str) -> SampleRow:
    return SampleRow(
        run_id="run-1",
        uid=uid,
        instance_id=1,
        group_id="g",
        epoch=0,
        slot=0,
        outcome="member",
        reward=1.0,
        at_s=0.0,
        received_at_s=0.0,
    )


def put(store: JournalStore, uid: str, size: int = 500) -> "asyncio.Future[Location | None]":
    return store.append([make_sample(uid)], uid.encode() * size)


async def uids_of(store: JournalStore) -> list[str]:
    return sorted(await all_uids(store, "run-1"))


async def put_until_refused(store: JournalStore, size: int = 500) -> list[str]:
    stored: list[str] = []
    for i in range(10_000):
        try:
            await put(store, f"{i:04d}", size)
        except StorageFailed:
            return stored
        stored.append(f"{i:04d}")
    raise AssertionError("the disk never filled up")


async def test_full_disk_refuses_everything_until_there_is_space_again(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with JournalStore(tmp_path, files=files) as store:
        await put(store, "first")
        files.free_bytes = 9_000
        stored = await put_until_refused(store)
        assert len(stored) > 1
        with pytest.raises(StorageFailed, match="No space left") as caught:
            await put(store, "tiny", 0)
        assert caught.value.status == 507
        with pytest.raises(StorageFailed, match="No space left"):
            await store.recover()
        with pytest.raises(StorageFailed, match="No space left"):
            await put(store, "still refused")
        assert await uids_of(store) == [*stored, "first"]
        files.free_bytes = None
        await store.recover()
        await put(store, "resumed")
        assert await uids_of(store) == [*stored, "first", "resumed"]
    (tmp_path / "index.sqlite").unlink()
    async with JournalStore(tmp_path) as store:
        assert await uids_of(store) == [*stored, "first", "resumed"]
        assert store.stats().num_torn_bytes == store.stats().num_quarantined == 0


async def test_nothing_of_a_commit_whose_sync_failed_is_left(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with JournalStore(tmp_path, files=files) as store:
        location = await put(store, "kept")
        size = store.stats().num_bytes
        files.refuses_sync = True
        futures = [put(store, f"lost-{i}") for i in range(20)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(result) for result in results] == [StorageFailed] * 20
        files.refuses_sync = False
        await store.recover()
        assert (tmp_path / "segments" / "00000001.log").stat().st_size == size
        await put(store, "next")
        assert await uids_of(store) == ["kept", "next"]
        assert location is not None
        assert await store.read([location]) == [b"kept" * 500]


async def test_roll_that_fails_leaves_no_segment_behind(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with JournalStore(tmp_path, segment_bytes=1, files=files) as store:
        await put(store, "a")
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await put(store, "b")
        files.refuses_sync = False
        await store.recover()
        assert [path.name for path in (tmp_path / "segments").iterdir()] == ["00000001.log"]
        await put(store, "c")
        assert await uids_of(store) == ["a", "c"]
        assert store.stats().num_segments == 2


async def test_append_made_before_recover_returned_is_refused(tmp_path: Path) -> None:
    """Its caller decided on it in the light of appends that did not happen."""
    files = RefusingFiles()
    async with JournalStore(tmp_path, files=files) as store:
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await put(store, "failed")
        files.refuses_sync = False
        recovering = asyncio.ensure_future(store.recover())
        await asyncio.sleep(0)
        with pytest.raises(StorageFailed):
            await put(store, "too early")
        await recovering
        await put(store, "after")
        assert await uids_of(store) == ["after"]


async def test_failed_appends_are_gone_after_leaving_without_recover(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with JournalStore(tmp_path, files=files) as store:
        await put(store, "kept")
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await put(store, "lost")
        files.refuses_sync = False
    async with JournalStore(tmp_path) as store:
        assert await uids_of(store) == ["kept"]


async def test_queries_and_reads_go_on_while_writing_fails(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with JournalStore(tmp_path, files=files) as store:
        location = await put(store, "kept")
        files.free_bytes = 0
        with pytest.raises(StorageFailed):
            await put(store, "lost")
        assert await uids_of(store) == ["kept"]
        assert location is not None
        assert await store.read([location]) == [b"kept" * 500]


async def test_use_outside_of_async_with_says_what_to_do(tmp_path: Path) -> None:
    store = JournalStore(tmp_path)
    with pytest.raises(RuntimeError, match="async with"):
        put(store, "u")
    async with store:
        await put(store, "u")
    with pytest.raises(RuntimeError, match="async with"):
        await store.load_runs()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs privileges; the fault layer covers this elsewhere")
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_really_full_disk(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 1_000_000)
    async with JournalStore(small_disk / "data") as store:
        stored = await put_until_refused(store, size=5_000)
        with pytest.raises(StorageFailed):
            await store.recover()
        ballast.unlink()
        await store.recover()
        await put(store, "resumed")
        assert await uids_of(store) == [*stored, "resumed"]
    async with JournalStore(small_disk / "data") as store:
        assert await uids_of(store) == [*stored, "resumed"]


async def test_a_caller_who_cannot_be_told_leaves_the_others_their_answers(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("this one does not listen")

    async with JournalStore(tmp_path) as store:
        first = put(store, "first")
        store.submit([make_sample("deaf")], b"deaf", fail)
        last = put(store, "last")
        assert await first
        assert await last
        assert await uids_of(store) == ["deaf", "first", "last"]
