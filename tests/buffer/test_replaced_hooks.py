"""Hooks that are replaced while groups are ready, with a trainer, or on their way back."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.deadlines import expire_leases
from forebay.buffer.leases.checkpoints import rewind
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.store.abc import Store
from forebay.core.clock import ManualClock
from forebay.core.group import Normaliser
from forebay.core.run import Run
from forebay.hooks.run_hooks import HookRunner
from tests.buffer.buffer_kit import fill, make_run, open_buffer, read, rows_of

GRPO, DR_GRPO = pytest.approx([-1, 1]), [-0.5, 0.5]


class Hooks:
    """Built-in ones with the normaliser that is set."""

    normaliser: Normaliser = "grpo"

    def __call__(self, run: Run) -> HookRunner:
        return HookRunner(task_type=run.task_type, plugins=False, normaliser=self.normaliser)


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


@pytest.fixture
async def buffer(store: Store, clock: ManualClock, hooks: Hooks) -> AsyncIterator[Buffer]:
    async with open_buffer(store, clock, hooks) as buffer:
        yield buffer


@pytest.fixture
async def entry(buffer: Buffer) -> LiveRun:
    """Two groups are ready."""
    entry = await buffer.add(make_run())
    await fill(entry, 1, [0.0, 1.0])
    await fill(entry, 2, [0.0, 1.0])
    return entry


async def replace(buffer: Buffer, hooks: Hooks) -> None:
    hooks.normaliser = "dr_grpo"
    await buffer.replace_hooks("run-1")


async def lease(entry: LiveRun) -> LeasedBatch:
    """One group, for ten seconds; the same again if it is asked for twice."""
    batch = await read(entry, num_groups=1, request_id="a", lease_s=10)
    assert batch is not None
    entry.delivery.leases.arrived(batch.batch_id)
    return batch


def rewards(batch: LeasedBatch | None) -> list[float]:
    assert batch is not None
    return [row["reward"] for row in rows_of(batch)]


async def test_what_waits_is_asked_about_again(buffer: Buffer, entry: LiveRun, hooks: Hooks) -> None:
    assert await read(entry, num_groups=3) is None, "both were looked at"
    await replace(buffer, hooks)
    assert rewards(await read(entry, num_groups=2)) == DR_GRPO * 2


async def release(entry: LiveRun, batch: LeasedBatch, clock: ManualClock) -> None:
    await entry.delivery.leases.release(batch.batch_id)


async def expire(entry: LiveRun, batch: LeasedBatch, clock: ManualClock) -> None:
    clock.advance(11)
    expire_leases(entry.delivery.leases)


async def undo(entry: LiveRun, batch: LeasedBatch, clock: ManualClock) -> None:
    await rewind(entry.delivery.leases, None)


@pytest.mark.parametrize("come_back", [release, expire, undo])
async def test_a_group_that_comes_back_is_asked_about_again(
    buffer: Buffer, entry: LiveRun, hooks: Hooks, clock: ManualClock, come_back: Callable[..., Awaitable[None]]
) -> None:
    batch = await lease(entry)
    assert rewards(batch) == GRPO
    await replace(buffer, hooks)
    await come_back(entry, batch, clock)
    assert rewards(await read(entry, num_groups=2)) == DR_GRPO * 2, "one normaliser for the whole batch"


async def test_a_repeated_request_gets_the_very_same_rows(
    buffer: Buffer, entry: LiveRun, hooks: Hooks, clock: ManualClock
) -> None:
    batch = await lease(entry)
    await replace(buffer, hooks)
    assert rows_of(await lease(entry)) == rows_of(batch)
    await expire(entry, batch, clock)
    await entry.delivery.leases.extend(batch.batch_id, None)
    assert rows_of(await lease(entry)) == rows_of(batch), "also if its lease had expired"
