"""What is left of a removed run: nothing that a disk, a replay, or a rebuilt index can bring back."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from forebay.buffer.buffer import Buffer
from forebay.buffer.retention import Retention
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import Conflict, RunNotFound, StorageFailed
from forebay.core.run import RunState
from tests.buffer.buffer_kit import end_process, fill, make_run, open_buffer, states, take, until
from tests.buffer.store.faulty_disks import RefusingFiles

SEGMENT_BYTES = 4_000


async def no_files(_: str) -> None:
    """As of a run without a folder."""


async def ended(buffer: Buffer, run_id: str) -> Retention:
    """A run with a delivered and a ready group, at its end."""
    entry = await buffer.add(make_run(run_id))
    await fill(entry, "taken", [0.0, 1.0], text="x" * 700)
    await take(entry)
    await fill(entry, "left", [0.0, 1.0], text="x" * 700)
    await end_process(buffer, run_id, RunState.STOPPED)
    await buffer.tick()
    return Retention(buffer, every_s=None)


async def test_the_source_of_a_replay_stays_until_its_end(store: Store) -> None:
    async with open_buffer(store) as buffer:
        retention = await ended(buffer, "source")
        buffer.sources["source"] += 1
        with pytest.raises(Conflict, match="is being replayed"):
            await retention.remove_run("source", no_files)
        assert len(await store.load_groups("source")) == 2
        buffer.sources["source"] -= 1
        await retention.remove_run("source", no_files)
        with pytest.raises(RunNotFound):
            await retention.remove_run("source", no_files)
    async with open_buffer(store) as buffer:
        assert not buffer.entries


async def test_a_run_stays_whole_where_the_disk_refuses_its_removal(tmp_path: Path) -> None:
    files = RefusingFiles()
    async with open_buffer(JournalStore(tmp_path / "data", files=files)) as buffer:
        retention = await ended(buffer, "run-1")
        before = states(buffer.get("run-1"))
        files.refuses_sync = True
        with pytest.raises(StorageFailed):
            await retention.remove_run("run-1", no_files)
        files.refuses_sync = False
        await until(lambda: buffer.is_healthy)
        assert states(buffer.get("run-1")) == before
        await retention.remove_run("run-1", no_files)
        assert not buffer.entries


async def test_a_rebuilt_index_knows_of_the_removal_though_its_segment_went_first(tmp_path: Path) -> None:
    path = tmp_path / "data"
    async with open_buffer(JournalStore(path, segment_bytes=SEGMENT_BYTES)) as buffer:
        retention = await ended(buffer, "removed")
        kept = await buffer.add(make_run("kept"))
        await retention.remove_run("removed", no_files)
        await fill(kept, "open", [0.0] * 2, text="x" * SEGMENT_BYTES)
        await fill(kept, "open too", [0.0] * 2, text="x" * SEGMENT_BYTES)
        await buffer.store.catch_up()
        [number] = query(path, "SELECT written_in FROM runs WHERE run_id = 'removed'")
        segments = {segment.number: segment for segment in await buffer.store.segments()}
        assert min(segments) < number < max(segments)
        moved = {(bodies.run_id, bodies.group_id) for bodies in segments[number].groups}
        buffer.store.begin_removal(number)
        await buffer.store.clear(number, moved)
        await buffer.store.remove(number)
        # Nothing of it keeps the segments in which it was written, either.
        done = await retention.collect()
        assert done.kept.keys() == {"open"}
    (path / "index.sqlite").unlink()
    async with open_buffer(JournalStore(path, segment_bytes=SEGMENT_BYTES)) as buffer:
        assert [entry.run.run_id for entry in buffer.entries] == ["kept"]
        for table in ("starts", "groups", "batches", "samples"):
            assert query(path, f"SELECT count(*) FROM {table} WHERE run_id = 'removed'") == [0]


def query(path: Path, statement: str) -> list[int]:
    with closing(sqlite3.connect(path / "index.sqlite")) as index:
        return [value for (value,) in index.execute(statement)]
