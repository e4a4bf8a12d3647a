"""Whatever happens to the files of the index: the server starts, and everything is as the log says."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from forebay.buffer.store.index import SCHEMA_VERSION
from forebay.buffer.store.journal import JournalStore
from tests.buffer.store.sample_entries import all_uids
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, make_group

ROUNDS = 208
SERVED_ROUNDS = 8
GROUP_SIZE = 4
PAGE_BYTES = 4096

Damage = Callable[[Path, random.Random], None]


def flip_bits(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 4, 32))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def flip_bits_of_values(file: Path, rng: random.Random) -> None:
    """Among what rows say, where SQLite can see nothing wrong."""
    data = bytearray(file.read_bytes())
    places = [place for place in range(len(data)) if chr(data[place]).isalnum()]
    for place in rng.sample(places, 3):
        data[place] ^= 1
    file.write_bytes(data)


def change_page(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data) // PAGE_BYTES or 1) * PAGE_BYTES
    length = min(PAGE_BYTES, len(data) - start)
    data[start : start + length] = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)
    file.write_bytes(data)


def swap_pages(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    pages = [data[start : start + PAGE_BYTES] for start in range(0, len(data), PAGE_BYTES)]
    if len(pages) > 2:
        one, other = rng.sample(range(len(pages)), 2)
        pages[one], pages[other] = pages[other], pages[one]
    file.write_bytes(b"".join(pages))


def cut_off(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def become_garbage(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(file.stat().st_size))


def become_folder(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()
    (file / "note").write_text("somebody made room")


def become_another_database(file: Path, _: random.Random) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE complete_up_to (segment INTEGER, offset INTEGER, checksum INTEGER)")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.commit()


def lose_rows(file: Path, rng: random.Random) -> None:
    """As another program might, with everything else in order."""
    table = rng.choice(("runs", "groups", "samples", "batches", "active_times", "complete_up_to"))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"DROP TABLE {table}")
        connection.commit()


ANY_FILE: tuple[Damage, ...] = (flip_bits, flip_bits_of_values, change_page, swap_pages, cut_off, become_garbage)
DATABASE_ONLY: tuple[Damage, ...] = (become_another_database, lose_rows)


def damage(data_dir: Path, rng: random.Random, number: int) -> str:
    """Damage one file of the index; what was done."""
    files = [file for suffix in ("", "-wal", "-shm") if (file := data_dir / f"index.sqlite{suffix}").exists()]
    # Mostly flips; the database itself half of the time.
    kinds = (*ANY_FILE, flip_bits, flip_bits_of_values, flip_bits_of_values, become_folder, *DATABASE_ONLY)
    kind = kinds[number % len(kinds)]
    file = files[0] if kind in DATABASE_ONLY or rng.random() < 0.5 else rng.choice(files)
    if file.stat().st_size:
        kind(file, rng)
    return f"round {number}: {kind.__name__} of {file.name}"


@pytest.fixture(scope="module")
def prepared(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two data directories, as a server leaves them that was stopped, and one that was killed later."""
    server = module_servers(segment_bytes=1 << 16)
    run = server.start_run(group_size=GROUP_SIZE)
    for number in range(120):
        run.write(*make_group(f"task-{number}", [1.0, 0.5, 0.0, number / 7], text="x" * (number * 37 % 400)))
        if number % 24 == 23:
            batch = run.take(num_groups=10)
            run.checkpoint(number // 24, batch)
    run.write(make_group("open", [1.0])[0])
    run.release(run.read(num_groups=3))
    server.stop()
    stopped = tmp_path_factory.mktemp("stopped") / "data"
    shutil.copytree(server.data_dir, stopped)
    server.restart()
    for number in range(120, 160):
        run.write(*make_group(f"task-{number}", [1.0, 0.5, 0.0, 0.25]))
    run.take(num_groups=10)
    run.groups()  # so that the index has it all
    server.kill9()
    killed = tmp_path_factory.mktemp("killed") / "data"
    shutil.copytree(server.data_dir, killed)
    assert (killed / "index.sqlite-wal").stat().st_size > 10 * PAGE_BYTES
    return [stopped, killed]


async def answers(data_dir: Path) -> list[object]:
    """Everything that the store says, and every body."""
    async with JournalStore(data_dir, segment_bytes=1 << 16) as store:
        [run] = await store.load_runs()
        found: list[object] = [run, sorted(await all_uids(store, run.run_id))]
        loads = (store.load_groups, store.load_samples, store.load_batches, store.load_checkpoints)
        found += [await load(run.run_id) for load in loads]
        pages, after = [], ""
        while page := await store.groups(run.run_id, after=after, limit=50):
            pages.append(page)
            after = page[-1].group_id
            assert len(pages) < 10, "endless pages"
        found.append(pages)
        group_ids = [group.group_id for page in pages for group in page]
        samples = await store.samples_of(run.run_id, group_ids)
        found.append(samples)
        places = [sample.location for each in samples.values() for sample in each]
        found.append(await store.read([place for place in places if not store.has_removed(place)]))
        found.append([await store.num_row_bytes(segment.number) for segment in await store.segments()])
    return found


def test_a_store_with_a_damaged_index_says_what_the_log_says(prepared: list[Path], tmp_path: Path) -> None:
    rng = random.Random(12)
    healthy = []
    for number, source in enumerate(prepared):
        shutil.copytree(source, tmp_path / f"healthy-{number}")
        healthy.append(asyncio.run(answers(tmp_path / f"healthy-{number}")))
    assert healthy[0] != healthy[1]
    num_set_aside = 0
    for number in range(ROUNDS):
        data_dir = tmp_path / "data"
        shutil.copytree(prepared[number % 2], data_dir)
        what = damage(data_dir, rng, number // 2)
        for _ in range(1 + (number % 10 == 0)):  # the second time it is sound again
            assert asyncio.run(answers(data_dir)) == healthy[number % 2], what
        num_set_aside += any(data_dir.glob("index.sqlite.damaged-*"))
        shutil.rmtree(data_dir)
    assert num_set_aside > ROUNDS / 3


def delivered(run: NativeRun) -> list[Json]:
    """Everything that the run still has to give."""
    rows: list[Json] = []
    while (batch := run.read(num_groups=1))["batch_id"]:
        run.ack(batch)
        rows += batch["data"]
    return sorted(rows, key=lambda row: str(row["uid"]))


def test_a_server_with_a_damaged_index_starts_and_delivers_everything(
    prepared: list[Path], make_server: MakeServer, tmp_path: Path
) -> None:
    rng = random.Random(34)
    expected: list[object] = []
    for number in range(SERVED_ROUNDS + 1):
        data_dir = tmp_path / f"data-{number}"
        shutil.copytree(prepared[1], data_dir)
        what = damage(data_dir, rng, number - 1) if number else "healthy"
        server = make_server(data_dir=data_dir, segment_bytes=1 << 16)
        [view] = server.client.get("/v1/runs").json()["runs"]
        run = NativeRun(server, view["run_id"])
        found = [run.groups(), run.batches(), delivered(run)]
        server.close()
        if not number:
            expected = found
            assert len(found[2]) >= 4 * 80
        assert found == expected, what
