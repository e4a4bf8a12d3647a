"""``kill -9`` while appending: a real process, a real disk, many rounds on the same directory."""

import asyncio
import random
import signal
import sys
from pathlib import Path

import pytest

from forebay.buffer.store.journal import JournalStore
from forebay.core.group import GroupState

PROGRAM = """
import asyncio, sys
from pathlib import Path
from forebay.buffer.store.journal import JournalStore
from forebay.core.records.rows import GroupRow, SampleRow

def append(store, number):
    group = str(number // 8)
    sample = SampleRow(
        run_id="run-1", uid=f"{number:08d}", instance_id=number // 8, group_id=group, epoch=0, slot=number % 8,
        outcome="member", reward=1.0, at_s=float(number), received_at_s=0.0,
    )
    rows = [sample]
    if number % 8 == 7:
        rows.append(GroupRow(
            run_id="run-1", group_id=group, instance_id=number // 8, epoch=0, state="ready", opened_s=0.0, order=number,
        ))
    return store.append(rows, sample.uid.encode() * (1 + number % 700))

async def one_writer(store, numbers):
    for number in numbers:
        await append(store, number)
        sys.stdout.write(f"{number:08d}\\n")
        sys.stdout.flush()

async def main(path, first):
    numbers = iter(range(first, 10**8))
    async with JournalStore(path, segment_bytes=200_000) as store:
        sys.stdout.write("open\\n")
        sys.stdout.flush()
        await asyncio.gather(*(one_writer(store, numbers) for _ in range(16)))

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


async def kill_while_writing(path: Path, first: int, after_lines: int) -> list[str]:
    """Start the writer, kill it after so many lines, and return the uids that it had acknowledged."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(path), str(first), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    async with asyncio.timeout(60):
        lines = [await child.stdout.readline() for _ in range(after_lines)]
        child.send_signal(signal.SIGKILL)
        rest = (await child.stdout.read()).splitlines(keepends=True)
        assert await child.wait() == -signal.SIGKILL
    assert lines[0] == b"open\n"
    # A line without its end was being written when the process died.
    return [line.decode().strip() for line in [*lines[1:], *rest] if line.endswith(b"\n") and line != b"open\n"]


async def check(path: Path, acknowledged: list[str]) -> int:
    """Everything acknowledged is there once, whole and in order; the number of the next sample."""
    async with JournalStore(path, segment_bytes=200_000) as store:
        samples = await store.load_samples("run-1")
        uids = [sample.row.uid for sample in samples]
        assert uids == sorted(set(uids))
        assert set(acknowledged) <= set(uids)
        assert uids == [f"{number:08d}" for number in range(len(uids))]
        bodies = await store.read([sample.location for sample in samples])
        assert all(body == uid.encode() * (1 + int(uid) % 700) for uid, body in zip(uids, bodies, strict=True))
        full = {group.group_id for group in await store.load_groups("run-1") if group.state is GroupState.READY}
        assert full == {str(number // 8) for number in range(len(uids)) if number % 8 == 7}
        assert store.stats().num_quarantined == 0
        return len(uids)


async def kill_rounds(path: Path, rounds: int) -> int:
    rng = random.Random(rounds)
    acknowledged: list[str] = []
    number = 0
    for _ in range(rounds):
        acknowledged += await kill_while_writing(path, number, rng.choice([1, 2, 20, 100, 400]))
        number = await check(path, acknowledged)
        if rng.random() < 0.2:
            (path / "index.sqlite").unlink()
    return len(acknowledged)


async def test_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    assert await kill_rounds(tmp_path, rounds=6) > 100


@pytest.mark.soak
async def test_killed_writer_loses_nothing_acknowledged_in_many_rounds(tmp_path: Path) -> None:
    assert await kill_rounds(tmp_path, rounds=40) > 2_000
