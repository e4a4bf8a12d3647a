"""Runs that have ended cost nothing while nothing is asked of them, and all that is due in them is still done."""

from collections import Counter

import pytest

from forebay.buffer.buffer import Buffer
from forebay.buffer.deadlines import Deadlines
from forebay.buffer.store.abc import Store
from forebay.core.clock import ManualClock
from forebay.core.run import RunState
from tests.buffer.buffer_kit import end_process, fill, make_run, open_buffer, read, states, take, write

NUM_ENDED = 20


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By run, how often a tick has looked at it."""
    counted: Counter[str] = Counter()
    advance = Deadlines.advance

    async def counting(deadlines: Deadlines) -> None:
        counted[deadlines._buffer.run.run_id] += 1
        await advance(deadlines)

    monkeypatch.setattr(Deadlines, "advance", counting)
    return counted


async def end(buffer: Buffer, run_id: str) -> None:
    """Two groups, of which one is delivered, and the end of the run."""
    entry = await buffer.add(make_run(run_id))
    await fill(entry, "taken", [0.0, 1.0])
    await take(entry)
    await fill(entry, "left", [0.0, 1.0])
    await end_process(buffer, run_id, RunState.STOPPED)


async def ticks(buffer: Buffer, num: int = 3) -> None:
    for _ in range(num):
        await buffer.tick()


async def test_a_tick_looks_at_living_runs_only(store: Store, visits: Counter[str]) -> None:
    async with open_buffer(store) as buffer:
        for number in range(NUM_ENDED):
            await end(buffer, f"ended-{number}")
        await buffer.add(make_run("living"))
        await ticks(buffer)
        assert buffer.get("ended-0").run.has_ended
        visits.clear()
        await ticks(buffer, 10)
        assert visits == {"living": 10}
    async with open_buffer(store) as buffer:
        await ticks(buffer)
        visits.clear()
        await ticks(buffer, 10)
        assert visits == {"living": 10}


async def test_a_lease_of_an_ended_run_still_expires(store: Store, clock: ManualClock, visits: Counter[str]) -> None:
    async with open_buffer(store, clock) as buffer:
        await end(buffer, "ended")
        await ticks(buffer)
        entry = buffer.get("ended")
        batch = await read(entry, num_groups=1, lease_s=10.0)
        assert batch is not None
        entry.delivery.leases.arrived(batch.batch_id)
        await ticks(buffer)
        assert states(entry)["left", 0] == "leased"
        clock.advance(11)
        await ticks(buffer, 1)
        assert states(entry)["left", 0] == "ready"
        await ticks(buffer)
        visits.clear()
        await ticks(buffer)
        assert not visits


async def test_what_is_over_leaves_memory_at_the_end_and_is_still_known(store: Store) -> None:
    async with open_buffer(store) as buffer:
        entry = await buffer.add(make_run("ended"))
        await write(entry, instance_id="taken", uid="first", reward=0.0)
        await write(entry, instance_id="taken", uid="second")
        await take(entry)
        await ticks(buffer)
        assert set(states(entry)) == {("taken", 0)}
        await end_process(buffer, "ended", RunState.STOPPED)
        await ticks(buffer)
        assert not states(entry)
        assert entry.buffer.groups.states["acked"] == 1
        await entry.buffer.gone.look_up([("taken", 0)])
        assert (await write(entry, instance_id="taken", epoch=0, slot=0, uid="first")).is_duplicate
        await ticks(buffer)
        assert not states(entry)


async def test_what_is_acknowledged_after_the_end_leaves_memory(store: Store, visits: Counter[str]) -> None:
    async with open_buffer(store, remembered_samples=0) as buffer:
        await end(buffer, "ended")
        await ticks(buffer)
        entry = buffer.get("ended")
        assert set(states(entry)) == {("left", 0)}
        await take(entry)
        await ticks(buffer)
        assert not states(entry)
        async with entry.buffer.gone.everything():
            await ticks(buffer)
            assert set(states(entry)) == {("left", 0), ("taken", 0)}
        await ticks(buffer)
        assert not states(entry)
        visits.clear()
        await ticks(buffer)
        assert not visits
