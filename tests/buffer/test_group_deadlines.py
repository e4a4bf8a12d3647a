"""Every group ends in finite time, whatever its generator, its readers and its hooks do."""

import asyncio
from pathlib import Path

import pytest

from forebay.buffer.admission import announce
from forebay.buffer.buffer import Buffer
from forebay.buffer.store.abc import Store
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.ids import InstanceId
from forebay.core.run import Run, RunState
from forebay.hooks.run_hooks import HookRunner
from tests.buffer.buffer_kit import (
    built_in_hooks,
    check_books,
    end_process,
    file_hooks,
    fill,
    make_run,
    open_buffer,
    read,
    states,
    take,
    until,
)


async def advance(buffer: Buffer, clock: ManualClock, seconds: float) -> None:
    clock.advance(seconds)
    await buffer.tick()


async def test_timeout_counts_from_the_last_sample(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0])
        await advance(buffer, clock, 299)
        await fill(entry, 1, [0.0])
        await advance(buffer, clock, 299)
        assert states(entry)[1, 0] == "open"
        await advance(buffer, clock, 2)
        assert states(entry)[1, 0] == "discarded: timed_out"


async def test_deadline_counts_from_the_opening(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=64))
        for _ in range(13):
            await fill(entry, 1, [0.0])
            await advance(buffer, clock, 290)
        assert states(entry)[1, 0] == "discarded: timed_out"


async def test_the_groups_that_close_next_are_known_and_still_close_in_time(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=2))

        def soonest(limit: int) -> list[tuple[InstanceId, float]]:
            now_s = entry.buffer.active.now_s()
            return [(group.instance_id, due_s - now_s) for due_s, group in entry.deadlines.soonest(limit)]

        for instance_id in (1, 2, 3, 4):
            await fill(entry, instance_id, [0.0])
            await advance(buffer, clock, 10)
        assert soonest(2) == [(1, 260), (2, 270)]
        await fill(entry, 2, [1.0])
        await take(entry, num_groups=1)
        await fill(entry, 1, [None])
        assert soonest(2) == soonest(2) == [(3, 280), (4, 290)]
        assert soonest(9) == [(3, 280), (4, 290), (1, 300)]
        await advance(buffer, clock, 281)
        assert soonest(9) == [(4, 9), (1, 19)]
        await advance(buffer, clock, 20)
        assert states(entry) == {
            (1, 0): "discarded: invalid",
            (2, 0): "acked",
            (3, 0): "discarded: timed_out",
            (4, 0): "discarded: timed_out",
        }


async def test_salvaged_group_skips_validity_but_not_the_minimum_of_items(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [1.0, 1.0, 1.0])  # equal rewards would not be valid
        await fill(entry, 2, [7.0, 7.0, 1.0])  # the filter leaves one
        await advance(buffer, clock, 301)
        batch = await take(entry)
        assert [g.instance_id for g in batch.groups] == [1]
        assert batch.groups[0].row.is_salvaged
        assert states(entry)[2, 0] == "discarded: filtered"


async def test_failed_samples_do_not_count_as_enough(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [None, None, 1.0])
        await advance(buffer, clock, 301)
        assert states(entry)[1, 0] == "discarded: timed_out"


async def test_full_group_that_nobody_reads_is_judged_at_its_deadline(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [1.0, 1.0])
        await advance(buffer, clock, 301)
        assert states(entry) == {(1, 0): "ready", (2, 0): "discarded: invalid"}


async def test_group_that_is_valid_while_short_is_kept_at_its_deadline(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=8, min_valid_group_size_ratio=0.25))
        await fill(entry, 1, [0.0, 1.0])
        await advance(buffer, clock, 301)
        assert states(entry)[1, 0] == "ready"
        assert not next(iter(entry.buffer.groups.by_id.values())).row.is_salvaged


async def test_announced_group_without_a_sample_ends(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await announce(entry.buffer, [(1, 0)])
        await advance(buffer, clock, 3_599)
        assert states(entry)[1, 0] == "open"
        await advance(buffer, clock, 2)
        assert states(entry)[1, 0] == "discarded: timed_out"


async def test_announced_group_without_a_sample_ends_sooner_without_a_process(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await announce(entry.buffer, [(1, 0)])
        clock.advance(1_000)
        await end_process(buffer, state=RunState.FAILED)
    async with open_buffer(store, clock) as buffer:
        entry = buffer.get("run-1")
        await advance(buffer, clock, 301)
        assert states(entry)[1, 0] == "discarded: timed_out"
        assert entry.run.has_ended


async def test_time_counted_survives_a_restart_and_none_passes_while_down(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0])
        for _ in range(20):
            await advance(buffer, clock, 10)
    clock.advance(100_000)
    async with open_buffer(store, clock) as buffer:
        entry = buffer.get("run-1")
        await buffer.tick()
        await advance(buffer, clock, 95)
        assert states(entry)[1, 0] == "open"
        await advance(buffer, clock, 10)
        assert states(entry)[1, 0] == "discarded: timed_out"


@pytest.mark.parametrize(
    "held", [{"state": RunState.VALIDATING}, {"is_waiting_for_engine": True}], ids=["validating", "waiting"]
)
async def test_no_time_counts_while_the_run_cannot_go_on(
    store: Store, clock: ManualClock, held: dict[str, object]
) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0])
        before = {name: getattr(entry.run, name) for name in held}

        async def change(values: dict[str, object]) -> None:
            await buffer.update("run-1", lambda run: [setattr(run, *item) for item in values.items()] and None)

        await change(held)
        await advance(buffer, clock, 10_000)
        assert states(entry)[1, 0] == "open"
        await change(before)
        await advance(buffer, clock, 299)
        assert states(entry)[1, 0] == "open"
        await advance(buffer, clock, 2)
        assert states(entry)[1, 0] == "discarded: timed_out"


async def test_run_whose_process_returned_waits_for_samples_of_jobs_elsewhere(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await end_process(buffer)
        await advance(buffer, clock, 200)
        await fill(entry, 1, [0.0, 1.0])
        await advance(buffer, clock, 200)
        assert not entry.run.has_ended
        await advance(buffer, clock, 101)
        assert entry.run.has_ended
        assert await fill(entry, 1, [0.0]) == ["late"]
        assert len((await take(entry)).rows) == 2


async def test_run_whose_last_slot_was_reported_ends_with_its_process(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [0.0])
        await announce(entry.buffer, [(3, 0)])
        entry.run.is_last_slot_reported = True
        await end_process(buffer)
        await buffer.tick()
        assert states(entry) == {(1, 0): "ready", (2, 0): "discarded: timed_out", (3, 0): "discarded: timed_out"}
        assert entry.run.has_ended


@pytest.mark.parametrize("state", [RunState.STOPPED, RunState.FAILED])
async def test_stopped_run_ends_when_its_groups_are_over(store: Store, clock: ManualClock, state: RunState) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0])
        await end_process(buffer, state=state)
        await buffer.tick()
        assert not entry.run.has_ended
        assert await fill(entry, 1, [0.0]) == ["member"]
        await advance(buffer, clock, 301)
        assert entry.run.has_ended


async def test_stalled_run_is_told_and_recovers(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        entry = await buffer.add(make_run())
        await advance(buffer, clock, 3_601)
        assert entry.buffer.is_stalled
        await fill(entry, 1, [0.0])
        assert not entry.buffer.is_stalled


SLOW = """
import pathlib, time
TASK_TYPE = "task"
def run_rollout(data): ...
def is_valid_group(group, size, task_type):
    folder = pathlib.Path(__file__).parent
    (folder / "asked").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    return True, True
"""


async def test_slow_hook_of_one_run_holds_up_no_deadline_of_another(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "task_generator.py"
    path.write_text(SLOW)
    slow = file_hooks(path)

    def hooks_for(run: Run) -> HookRunner:
        return slow(run) if run.run_id == "slow" else built_in_hooks(run)

    async with asyncio.timeout(20), Buffer(MemoryStore(), hooks_for, clock, tick_s=0.001) as buffer:
        await fill(await buffer.add(make_run("slow")), 1, [0.0, 1.0])
        other = await buffer.add(make_run("other"))
        clock.advance(301)
        await until((tmp_path / "asked").exists)
        await fill(other, 2, [0.0])
        clock.advance(301)
        await until(lambda: states(other)[2, 0] == "discarded: timed_out")
        assert states(buffer.get("slow"))[1, 0] == "open"
        (tmp_path / "go").touch()
        await until(lambda: states(buffer.get("slow"))[1, 0] == "ready")


async def test_fault_in_one_run_stops_no_deadline_of_another(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ArithmeticError):
        pass

    def hooks_for(run: Run) -> HookRunner:
        runner = built_in_hooks(run)
        if run.run_id == "run-1":

            async def judge(*_: object) -> None:
                raise Broken

            runner.judge = judge  # type: ignore[assignment, method-assign]
        return runner

    async with open_buffer(MemoryStore(), clock, hooks_for) as buffer:
        await fill(await buffer.add(make_run("run-1")), 1, [0.0, 1.0])
        other = await buffer.add(make_run("run-2"))
        await fill(other, 1, [0.0])
        for _ in range(2):
            await advance(buffer, clock, 301)
        assert states(other)[1, 0] == "discarded: timed_out"
        assert "Broken" in caplog.text
        check_books(buffer.get("run-1"))


async def test_deadlines_are_kept_by_a_timer(clock: ManualClock) -> None:
    async with asyncio.timeout(20), Buffer(MemoryStore(), built_in_hooks, clock, tick_s=0.001) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0])
        clock.advance(301)
        await until(lambda: states(entry)[1, 0] == "discarded: timed_out")


async def test_sample_that_comes_in_time_while_a_reader_holds_the_run_saves_its_group(clock: ManualClock) -> None:
    async with open_buffer(MemoryStore(), clock) as buffer:
        entry = await buffer.add(make_run(group_size=4))
        await fill(entry, 1, [0.0])
        clock.advance(301)
        async with entry.buffer.lock:
            ticking = asyncio.create_task(buffer.tick())
            await asyncio.sleep(0)
            await fill(entry, 1, [1.0])
        await ticking
        assert states(entry)[1, 0] == "open"
        await advance(buffer, clock, 301)
        assert states(entry)[1, 0] == "discarded: timed_out"


async def test_cancelled_tick_forgets_no_deadline(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "task_generator.py"
    path.write_text(SLOW)
    async with open_buffer(MemoryStore(), clock, file_hooks(path)) as buffer:
        entry = await buffer.add(make_run())
        await fill(entry, 1, [0.0, 1.0])
        await fill(entry, 2, [0.0, 1.0])
        clock.advance(301)
        ticking = asyncio.create_task(buffer.tick())
        await until((tmp_path / "asked").exists)
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        (tmp_path / "go").touch()
        await buffer.tick()
        assert set(states(entry).values()) == {"ready"}
        assert await read(entry) is not None
