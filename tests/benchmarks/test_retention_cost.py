"""What a look at a journal costs that is full of samples which only replays need."""

import asyncio
import time
from pathlib import Path

import pytest

from forebay.buffer.buffer import LiveRun
from forebay.buffer.leases.checkpoints import checkpoint
from forebay.buffer.retention import Retention
from forebay.buffer.store.journal import JournalStore
from tests.benchmarks.machines import show
from tests.buffer import buffer_kit
from tests.buffer.buffer_kit import make_run, open_buffer, put, read

pytestmark = pytest.mark.bench

NUM_STEPS, GROUPS_PER_STEP = 12, 1_000
TEXT = "x" * 250
SEGMENT_BYTES = 512 << 10
"""Some thirty segments, as 8 GiB have with their 256 MiB. With 100 000 groups: 2 s at first, 40 ms again."""
MOST_AGAIN = 0.3


async def train(entry: LiveRun, step: int) -> None:
    """Groups that are written, delivered, and held by a checkpoint."""
    first = GROUPS_PER_STEP * step
    receipts = [
        put(entry, uid=f"{number}/{slot}", instance_id=number, reward=float(slot), text=TEXT)
        for number in range(first, first + GROUPS_PER_STEP)
        for slot in range(2)
    ]
    await asyncio.gather(*(receipt.stored for receipt in receipts))
    batch = await read(entry, num_groups=GROUPS_PER_STEP)
    assert batch is not None
    assert len(batch.groups) == GROUPS_PER_STEP
    entry.delivery.leases.arrived(batch.batch_id)
    await checkpoint(entry.delivery.leases, step, [batch.batch_id])
    await entry.buffer.gone.forget()


async def cpu_s(retention: Retention) -> float:
    """CPU seconds of one look, the index's included."""
    begun_s = time.process_time()
    await retention.collect(surveys=False)
    return time.process_time() - begun_s


async def test_a_look_is_at_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_kit, "TIME_LIMIT_S", 600.0)
    store = JournalStore(tmp_path, segment_bytes=SEGMENT_BYTES)
    async with open_buffer(store, remembered_samples=0) as buffer:
        entry = await buffer.add(make_run(keep_checkpoints=1))
        for step in range(1, NUM_STEPS + 1):
            await train(entry, step)
        retention = Retention(buffer, every_s=None, replay_bytes=1 << 40)
        first_s = await cpu_s(retention)
        again_s = await cpu_s(retention)
        assert retention.num_replayable_bytes > (NUM_STEPS - 2) * GROUPS_PER_STEP * 2 * len(TEXT)
    rows = [("first", first_s), ("again", again_s)]
    show("a look at samples that only replays need", ["look", "CPU ms"], [[n, f"{s * 1_000:.1f}"] for n, s in rows])
    assert again_s < MOST_AGAIN * first_s
