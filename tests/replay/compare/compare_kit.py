"""Runs that were recorded in this process, with the test's clock, and the files that they become."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.buffer.admission import announce
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.journal_source import JournalSource
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.records.rows import GroupRow
from forebay.core.run import Run
from forebay.hooks.run_hooks import HookRunner
from tests.buffer.buffer_kit import MakeHooks, end_process, fill, make_run, open_buffer, read, take
from tests.replay.recordings.recording_kit import RecordingWriter

GROUP_SIZE = 4
TIMEOUT_S = 10.0

HOOKS = """
TASK_TYPE = "task"
def run_rollout(data):
    pass
"""
"""A generator file without hooks, to be continued."""


@dataclass
class Recorder:
    """A run that is being recorded."""

    clock: ManualClock
    store: MemoryStore
    buffer: Buffer
    entry: LiveRun

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.buffer.tick()

    async def save(self, path: Path) -> list[GroupRow]:
        """Write the file; its groups."""
        source = JournalSource(self.entry.run, self.store)
        groups = list(await source.groups())
        with RecordingWriter(path, source.run) as writer:
            for group in groups:
                samples = (await source.samples([group.group_id]))[group.group_id]
                for sample, body in zip(samples, await source.bodies(samples), strict=True):
                    writer.add_sample(sample.row, body)
                writer.add_group(group)
            for batch in await source.batches():
                writer.add_batch(batch)
        return groups


async def record_every_verdict(path: Path) -> list[GroupRow]:
    """A file with a group of each verdict that built-in hooks and deadlines bring about."""
    clock, store = ManualClock(), MemoryStore()
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=GROUP_SIZE, group_timeout_seconds=TIMEOUT_S))
        made = Recorder(clock, store, buffer, entry)
        await fill(entry, "plain", [0, 1, 0, 1])
        await take(entry)
        await fill(entry, "invalid", [1, 1, 1, 1])
        await fill(entry, "failed", [None] * 4)
        await fill(entry, "filtered", [0, 2, 3, 4])
        await read(entry)
        await fill(entry, "timed out", [0, 1, None])
        await fill(entry, "late", [0, 1], epoch=0)
        await made.pass_time(TIMEOUT_S + 1)
        await fill(entry, "late", [0, 1], epoch=0)
        await fill(entry, "salvaged", [0, 1, 0.5])
        await made.pass_time(TIMEOUT_S + 1)
        await take(entry)
        await fill(entry, "no reader", [0, 0, 1, 1])
        await fill(entry, "open", [0, 1])
        return await made.save(path)


async def record_groups(
    path: Path,
    rewards: Iterable[list[float | None]],
    make_hooks: MakeHooks | None = None,
    *,
    step_of: int = 0,
    **run: Any,
) -> list[GroupRow]:
    """A file with groups of these rewards, each read as soon as it is there; ``step_of`` of them make a step."""
    clock, store = ManualClock(), MemoryStore()
    given = {} if make_hooks is None else {"make_hooks": make_hooks}
    async with open_buffer(store, clock, **given) as buffer:
        started = make_run(group_size=GROUP_SIZE)
        for name, value in run.items():
            setattr(started, name, value)
        entry = await buffer.add(started)
        for number, each in enumerate(rewards):
            for reward in each:
                info = {"finish_reason": "stop", "quality": reward}
                await fill(entry, f"row-{number}", [reward], extra_info=info)
            batch = await read(entry, num_groups=1, **({"step": number // step_of} if step_of else {}))
            if batch is not None:
                await entry.delivery.leases.ack(batch.batch_id)
        return await Recorder(clock, store, buffer, entry).save(path)


async def record_by_chance(path: Path, seed: int) -> list[GroupRow]:
    """A file of a run whose samples, pauses and reads are drawn."""
    chance = random.Random(seed)
    is_slime, has_places = chance.random() < 0.5, chance.random() < 0.7
    settings = {
        "group_timeout_seconds": TIMEOUT_S,
        "group_deadline_seconds": chance.choice([25, 3_600]),
        "min_valid_group_size_ratio": chance.choice([1.0, 0.5]),
        "min_timeout_group_size_ratio": chance.choice([0.7, 0.5, 1.0]),
        "contract": chance.choice(["A", "B"]),
    }
    clock, store = ManualClock(), MemoryStore()
    async with open_buffer(store, clock, _hooks_of) as buffer:
        made = Recorder(clock, store, buffer, await buffer.add(make_run(group_size=GROUP_SIZE, **settings)))
        for _ in range(150):
            await _something(made, chance, is_slime=is_slime, has_places=has_places)
        if chance.random() < 0.5:
            await end_process(buffer)
            await buffer.tick()
        return await made.save(path)


def _hooks_of(run: Run) -> HookRunner:
    return HookRunner(task_type=run.task_type, contract=run.settings.contract, plugins=False)


async def _something(made: Recorder, chance: random.Random, *, is_slime: bool, has_places: bool) -> None:
    what, entry = chance.random(), made.entry
    if what < 0.65:
        place = {"epoch": chance.randrange(2), "slot": chance.randrange(GROUP_SIZE)} if has_places else {}
        reward = chance.choice([0, 0, 1, 1, 0.5, None, 5])
        await fill(entry, chance.randrange(12), [reward], **place)
    elif what < 0.7 and has_places:
        await announce(entry.buffer, [(chance.randrange(12), chance.randrange(2))])
    elif what < 0.85:
        await made.pass_time(chance.choice([0.5, 2, 6, 12]))
    else:
        request: dict[str, Any] = {"is_slime": True} if is_slime else {"num_groups": chance.choice([1, 2])}
        batch = await read(entry, **request)
        if batch is not None and chance.random() < 0.8:
            await entry.delivery.leases.ack(batch.batch_id)
        elif batch is not None:
            await entry.delivery.leases.release(batch.batch_id)
