"""Buffers whose time the test moves: runs, samples and reads without a server."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forebay.buffer.admission import Receipt
from forebay.buffer.admission import write as write_sample
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.reads.selection import ReadRequest
from forebay.buffer.store.abc import Store
from forebay.core.clock import ManualClock
from forebay.core.ids import InstanceId
from forebay.core.run import Run, RunSettings, RunState
from forebay.core.sample import read_sample
from forebay.core.starts.run_start import RunStart
from forebay.hooks.check import check_hooks
from forebay.hooks.run_hooks import HookRunner
from tests.kit import make_sample

TIME_LIMIT_S = 20.0
EVERYTHING = ReadRequest(is_slime=True)

MakeHooks = Callable[[Run], HookRunner]


def built_in_hooks(run: Run) -> HookRunner:
    return HookRunner(task_type=run.task_type, plugins=False)


def file_hooks(path: Path, **settings: Any) -> MakeHooks:
    """The hooks of a generator file."""
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), namespace)
    hooks = list(check_hooks(namespace).hooks)

    def make(run: Run) -> HookRunner:
        return HookRunner(task_type=run.task_type, module_path=path, user_hooks=hooks, plugins=False, **settings)

    return make


def make_run(run_id: str = "run-1", group_size: int = 2, *, name: str = "", **payload: Any) -> Run:
    """A run whose process is up."""
    skip = payload.pop("skip", [])
    return Run(
        run_id=run_id,
        run_key=f"key-of-{run_id}",
        name=name,
        origin="slime",
        task_type="task",
        settings=RunSettings.parse({"num_repeat_per_sample": group_size, **payload}),
        start=RunStart.of({"num_repeat_per_sample": group_size, **payload, "skip_instance_ids": skip}, list(skip)),
        created_at_s=1.0,
        started_at_s=1.0,
        state=RunState.RUNNING,
    )


@asynccontextmanager
async def open_buffer(
    store: Store,
    clock: ManualClock | None = None,
    make_hooks: MakeHooks = built_in_hooks,
    limit_s: float = TIME_LIMIT_S,
    **more: Any,
) -> AsyncIterator[Buffer]:
    """A buffer without a timer: the test calls ``tick``."""
    made = Buffer(store, make_hooks, clock or ManualClock(), tick_s=None, **more)
    async with asyncio.timeout(limit_s), made as buffer:
        yield buffer


def put(entry: LiveRun, **changes: Any) -> Receipt:
    """Hand a sample over, without waiting for the disk."""
    return write_sample(entry.buffer, read_sample(json.dumps(make_sample(**changes)).encode(), is_lenient=True))


async def write(entry: LiveRun, **changes: Any) -> Receipt:
    result = put(entry, **changes)
    await result.stored
    return result


async def fill(entry: LiveRun, instance_id: InstanceId, rewards: Sequence[float | None], **changes: Any) -> list[str]:
    """A sample per reward, None for a failed one; what became of each."""
    outcomes = []
    for reward in rewards:
        outcome = {"reward": reward} if reward is not None else {"reward": ..., "status": "failed", "error": "no"}
        outcomes.append((await write(entry, instance_id=instance_id, **outcome, **changes)).outcome)
    return outcomes


async def read(entry: LiveRun, *, wait_s: float = 0.0, **request: Any) -> LeasedBatch | None:
    """A slime read if nothing is said."""
    return await entry.delivery.read(ReadRequest(**request) if request else EVERYTHING, wait_s)


async def take(entry: LiveRun, **request: Any) -> LeasedBatch:
    """A batch that is there, and is acked."""
    batch = await read(entry, **request)
    assert batch is not None
    entry.delivery.leases.ack_soon(batch.batch_id)
    return batch


def rows_of(batch: LeasedBatch) -> list[dict[str, Any]]:
    return [json.loads(b"".join(parts)) for parts in batch.rows]


def uids_of(batch: LeasedBatch) -> list[str]:
    return [row["uid"] for row in rows_of(batch)]


def states(entry: LiveRun) -> dict[tuple[InstanceId, int], str]:
    """Instance and epoch → state, with the reason where there is one."""
    groups = entry.buffer.groups.by_id.values()
    return {
        (g.instance_id, g.row.epoch): f"{g.state}: {g.row.reason}" if g.row.reason else str(g.state) for g in groups
    }


async def end_process(buffer: Buffer, run_id: str = "run-1", state: RunState = RunState.FINISHED) -> None:
    """What the supervisor tells when the run's process is gone."""
    now_s = buffer.get(run_id).buffer.active.now_s()

    def change(run: Run) -> None:
        run.state, run.process_ended_s, run.reason = state, now_s, state.value

    await buffer.update(run_id, change)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another process, or a thread, does and cannot announce."""
    async with asyncio.timeout(TIME_LIMIT_S):
        while not condition():  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.002)


async def turns(number: int = 5) -> None:
    """Let other tasks run until they wait."""
    for _ in range(number):
        await asyncio.sleep(0)


def check_books(entry: LiveRun) -> None:
    """What is kept in two places agrees."""
    groups = entry.buffer.groups
    live = [group for group in groups.by_id.values() if group.samples]
    assert groups.num_live_samples == sum(len(group.samples) for group in live)
    assert groups.num_live_bytes == sum(group.num_bytes for group in live)
    assert +groups.states == Counter(group.state for group in groups.by_id.values())
    assert list(groups.closed) == [group.row.closed_seq for group in groups.closed.values()]
    assert set(groups.closed) <= set(range(1, groups.num_closed + 1))
    assert set(groups.unreported) == {
        g.group_id for g in groups.by_id.values() if g.state == "discarded" and not g.row.is_reported
    }
    assert set(groups.idle) == {g.group_id for g in groups.by_id.values() if g.row.idle_since_s is not None}
    for group in groups.by_id.values():
        assert (group.state in ("open", "ready", "leased")) or not group.samples
