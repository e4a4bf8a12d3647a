"""The index is disposable: lost, behind, ahead, damaged or of another schema, the answers are the same."""

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from forebay.buffer.store import index, log_writer
from forebay.buffer.store.index import SCHEMA_VERSION, Feeder, Index
from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed
from forebay.core.group import GroupState
from forebay.core.records.rows import GroupRow, RunRow, SampleRow, StoredSample, TickRow
from tests.buffer.store.sample_entries import all_uids

Answers = tuple[list[RunRow], list[GroupRow], list[StoredSample], list[str]]


def make_sample(number: int) -> SampleRow:
    return SampleRow(
        run_id="run-1",
        uid=f"{number:04d}",
        instance_id=number // 8,
        group_id=f"g{number // 8}",
        epoch=0,
        slot=number % 8,
        outcome="member" if number % 11 else "late",
        reward=float(number),
        at_s=float(number),
        received_at_s=0.0,
    )


async def fill(store: JournalStore, start: int = 0, stop: int = 400) -> None:
    run = RunRow(run_id="run-1", name="n", task_type="t", state="s", created_at_s=1.0, active_s=2.0, document={})
    await store.append([run])
    for i in range(start, stop):
        store.append([make_sample(i)], b"%d" % i)
        if i % 16 == 15:
            group = GroupRow(
                run_id="run-1", group_id=f"g{i // 8}", instance_id=i // 8, epoch=0, state=GroupState.ACKED, opened_s=1.0
            )
            await store.append([group, TickRow(run_id="run-1", active_s=i / 2)])
    await store.append([TickRow(run_id="run-1", active_s=stop - 0.5)])


async def answers(store: JournalStore) -> Answers:
    return (
        await store.load_runs(),
        await store.load_groups("run-1"),
        await store.load_samples("run-1"),
        sorted(await all_uids(store, "run-1")),
    )


@pytest.fixture
async def filled(tmp_path: Path) -> tuple[Path, Answers]:
    path = tmp_path / "data"
    async with JournalStore(path, segment_bytes=20_000) as store:
        await fill(store)
        expected = await answers(store)
    assert len(expected[3]) == 400
    return path, expected


def lose(index: Path) -> None:
    index.unlink()


def become_text(index: Path) -> None:
    index.write_text("this is no database\n" * 400)


def become_short(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:5_000])


def become_empty(index: Path) -> None:
    index.write_bytes(b"")


def change_pages(index: Path) -> None:
    data = bytearray(index.read_bytes())
    data[8_192:-4_096] = b"\xa5" * (len(data) - 12_288)
    index.write_bytes(data)


def change_words_of_schema(index: Path) -> None:
    """SQLite quotes them, and Python cannot read what it says then."""
    data = index.read_bytes()
    assert b"CREATE TABLE batches" in data
    index.write_bytes(data.replace(b"CREATE TABLE batches", b"CREATE TABL\xe5 batches"))


def change_schema(index: Path) -> None:
    with sqlite3.connect(index) as connection:
        connection.execute("DROP TABLE samples")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


def run_ahead(index: Path) -> None:
    with sqlite3.connect(index) as connection:
        connection.execute("UPDATE complete_up_to SET segment = 99")
        connection.execute("DELETE FROM samples")
    connection.close()


@pytest.mark.parametrize(
    "damage",
    [lose, become_text, become_short, become_empty, change_pages, change_words_of_schema, change_schema, run_ahead],
)
async def test_damaged_index_is_built_anew(filled: tuple[Path, Answers], damage: Callable[[Path], None]) -> None:
    path, expected = filled
    damage(path / "index.sqlite")
    async with JournalStore(path) as store:
        assert await answers(store) == expected
        await fill(store, 400, 420)
        assert len(await all_uids(store, "run-1")) == 420
    async with JournalStore(path) as store:
        assert len(await all_uids(store, "run-1")) == 420


@pytest.mark.parametrize("damage", [change_pages, change_words_of_schema])
async def test_index_damaged_while_open_is_built_anew_by_the_query_that_finds_it(
    filled: tuple[Path, Answers], damage: Callable[[Path], None]
) -> None:
    path, expected = filled
    async with JournalStore(path) as store:
        damage(path / "index.sqlite")
        assert await answers(store) == expected
        await fill(store, 400, 420)
        assert len(await all_uids(store, "run-1")) == 420


async def test_index_that_is_behind_is_brought_up_to_date(tmp_path: Path) -> None:
    path, copy = tmp_path / "data", tmp_path / "old.sqlite"
    async with JournalStore(path, segment_bytes=20_000) as store:
        await fill(store, 0, 200)
    shutil.copy(path / "index.sqlite", copy)
    async with JournalStore(path, segment_bytes=20_000) as store:
        await fill(store, 200, 400)
        expected = await answers(store)
    shutil.copy(copy, path / "index.sqlite")
    async with JournalStore(path) as store:
        assert await answers(store) == expected


async def test_opening_with_an_index_up_to_date_reads_nothing_of_the_log(filled: tuple[Path, Answers]) -> None:
    path, expected = filled
    segments = sorted((path / "segments").iterdir())
    assert len(segments) > 3
    for segment in segments:
        segment.write_bytes(b"\x00" * segment.stat().st_size)
    async with JournalStore(path) as store:
        assert await answers(store) == expected
        assert store.stats().num_quarantined == 0


async def test_damage_found_while_the_index_is_rebuilt_is_reported_and_the_rest_is_there(
    filled: tuple[Path, Answers],
) -> None:
    path, expected = filled
    segment = path / "segments" / "00000002.log"
    data = segment.read_bytes()
    segment.write_bytes(data[:200] + b"\xff" * 10 + data[210:])
    (path / "index.sqlite").unlink()
    async with JournalStore(path) as store:
        found = sorted(await all_uids(store, "run-1"))
        assert store.stats().num_quarantined == 1
    assert len(expected[3]) - 2 <= len(found) < len(expected[3])
    assert len(list((path / "quarantine").iterdir())) == 1


async def test_damage_that_cannot_be_copied_keeps_nobody_from_starting(filled: tuple[Path, Answers]) -> None:
    path, expected = filled
    segment = path / "segments" / "00000002.log"
    data = segment.read_bytes()
    segment.write_bytes(data[:200] + b"\xff" * 10 + data[210:])
    (path / "index.sqlite").unlink()
    (path / "quarantine").write_text("no folder")
    async with JournalStore(path) as store:
        assert len(expected[3]) - 2 <= len(await all_uids(store, "run-1"))
        assert store.stats().num_quarantined == 1


async def test_removed_segment_costs_only_its_own_records(filled: tuple[Path, Answers]) -> None:
    path, _ = filled
    async with JournalStore(path) as store:
        samples = await store.load_samples("run-1")
        gone = [sample for sample in samples if sample.location.segment == 1]
        (path / "segments" / "00000001.log").unlink()
        with pytest.raises(StorageFailed, match="segment 1"):
            await store.read([gone[0].location])
    (path / "index.sqlite").unlink()
    async with JournalStore(path) as store:
        found = await all_uids(store, "run-1")
        assert {s.row.uid for s in samples} - {s.row.uid for s in gone} <= found
        assert gone[0].row.uid not in found


async def test_index_that_cannot_be_written_stops_the_store_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with JournalStore(tmp_path) as store:
        await store.append([make_sample(1)], b"1")
        with monkeypatch.context() as patch:
            patch.setattr(Index, "_write", refuse)
            with pytest.raises(StorageFailed, match="disk is full"):
                await all_uids(store, "run-1")
            with pytest.raises(StorageFailed, match="disk is full"):
                await store.append([make_sample(2)], b"2")
            with pytest.raises(StorageFailed, match="disk is full"):
                await store.recover()
        await store.recover()
        await store.append([make_sample(3)], b"3")
        assert sorted(await all_uids(store, "run-1")) == ["0001", "0003"]


async def test_index_catches_up_while_nothing_is_asked_of_it(tmp_path: Path) -> None:
    """A process killed while idle has little of the log to read when it opens."""

    def position() -> tuple[int, int]:
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection:
            return cast("tuple[int, int]", connection.execute("SELECT segment, offset FROM complete_up_to").fetchone())

    async with JournalStore(tmp_path) as store:
        await fill(store)
        end = (1, store.stats().num_bytes)
        async with asyncio.timeout(20):
            while position() != end:  # noqa: ASYNC110 - a file seen from outside gives no event
                await asyncio.sleep(0.005)
        assert position() == end


def set_reward(index: Path) -> None:
    with sqlite3.connect(index) as connection:
        connection.execute("UPDATE samples SET rows = replace(rows, '39.0', '93.0')")
    connection.close()


async def test_a_value_that_another_hand_changed_is_not_believed(filled: tuple[Path, Answers]) -> None:
    path, expected = filled
    set_reward(path / "index.sqlite")
    async with JournalStore(path) as store:
        assert await answers(store) == expected
        set_reward(path / "index.sqlite")
        assert await answers(store) == expected
    assert len(list(path.glob("index.sqlite.damaged-*Z"))) == 1


async def test_a_lock_on_the_index_is_no_damage(filled: tuple[Path, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = filled
    with closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as other, monkeypatch.context() as patch:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        connect = sqlite3.connect
        patch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, timeout=0.05, **options))
        with pytest.raises(StorageFailed, match="locked"):
            await JournalStore(path).__aenter__()
    async with JournalStore(path) as store:
        assert await answers(store) == expected
    assert not list(path.glob("index.sqlite.damaged-*"))


async def test_a_query_lets_samples_be_stored_before_the_index_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "IDLE_S", 60.0)  # nothing but a query feeds the index
    monkeypatch.setattr(index, "SLICE_ENTRIES", 16)
    feed, loop = Feeder.feed, asyncio.get_running_loop()
    stored: list[str] = []
    num_stored: list[int] = []

    async def store_more(number: int) -> None:
        await store.append([make_sample(number)], b"x")
        stored.append(f"{number:04d}")

    def feed_and_store(feeder: Feeder) -> None:
        feed(feeder)
        num_stored.append(len(stored))
        asyncio.run_coroutine_threadsafe(store_more(100 + len(num_stored)), loop)

    async with JournalStore(tmp_path) as store:
        for number in range(100):
            await store.append([make_sample(number)], b"x")
        monkeypatch.setattr(Feeder, "feed", feed_and_store)
        uids = await all_uids(store, "run-1")
        assert uids >= {f"{number:04d}" for number in range(100)}
        assert len(num_stored) == 7
        assert 0 < num_stored[-1] <= 6
        monkeypatch.undo()
        assert await all_uids(store, "run-1") >= {*uids, *stored}
