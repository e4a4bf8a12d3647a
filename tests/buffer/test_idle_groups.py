"""A group of which the run process says that no rollout is in flight does not age, over restarts too."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.buffer.admission import announce
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.idle_groups import QUIET_S, note_groups, note_new_process, oldest_age_s
from forebay.buffer.store.abc import Store
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.records.rows import GroupRow
from forebay.core.run import RunState
from tests.buffer.buffer_kit import check_books, end_process, fill, make_run, open_buffer, states

KEY = (1, 0)
TIMEOUT_S, DEADLINE_S = 300, 3_600


class Group:
    """One group of a run, its process, and the time."""

    def __init__(self, buffer: Buffer, clock: ManualClock) -> None:
        self.buffer = buffer
        self.clock = clock

    @property
    def entry(self) -> LiveRun:
        return self.buffer.get("run-1")

    @property
    def state(self) -> str:
        return states(self.entry)[KEY]

    @property
    def row(self) -> GroupRow:
        return next(iter(self.entry.buffer.groups.by_id.values())).row

    async def begin(self, group_size: int = 4, **payload: Any) -> None:
        await self.buffer.add(make_run(group_size=group_size, **payload))
        await announce(self.entry.buffer, [KEY])

    async def sample(self) -> None:
        assert await fill(self.entry, 1, [0.0]) == ["member"]

    async def tell(self, *, idle: bool) -> None:
        await note_groups(self.entry.buffer, [KEY] if idle else [], [] if idle else [KEY])

    async def pass_s(self, seconds: float, *, is_heard: bool = True) -> None:
        """Time goes by, and the process speaks every minute."""
        while seconds > 0:
            step_s = min(seconds, 60.0)
            seconds -= step_s
            self.clock.advance(step_s)
            if is_heard:
                await note_groups(self.entry.buffer, [], [])
            await self.buffer.tick()
        check_books(self.entry)

    async def closes_in(self, seconds: float, *, is_heard: bool = True) -> bool:
        """Whether it is open until just before then, and closed just after."""
        await self.pass_s(seconds - 1, is_heard=is_heard)
        was_open = self.state == "open"
        await self.pass_s(2, is_heard=is_heard)
        return was_open and self.state != "open"


async def test_the_time_out_stands_still_while_it_is_idle(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.sample()
        await group.pass_s(100)
        await group.tell(idle=True)
        await group.pass_s(10 * TIMEOUT_S)
        assert group.state == "open"
        await group.tell(idle=False)
        assert await group.closes_in(TIMEOUT_S - 100)


async def test_the_deadline_stands_still_while_it_is_idle(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin(group_timeout_seconds=100_000)
        for _ in range(3):
            await group.pass_s(500)
            await group.tell(idle=True)
            await group.pass_s(2 * DEADLINE_S)
            await group.sample()  # that was under way
            await group.tell(idle=False)
        assert round(oldest_age_s(group.entry.buffer)) == 1_500
        assert await group.closes_in(DEADLINE_S - 1_500)
        assert (group.row.idle_since_s, round(group.row.idle_s)) == (None, 6 * DEADLINE_S)


async def test_a_sample_begins_the_time_out_anew_also_in_between(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.sample()
        await group.pass_s(200)
        await group.tell(idle=True)
        await group.pass_s(1_000)
        await group.sample()
        await group.pass_s(1_000)
        await group.tell(idle=False)
        assert await group.closes_in(TIMEOUT_S)


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy again"])
async def test_it_holds_over_a_restart(store: Store, clock: ManualClock, is_idle: bool) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.sample()
        await group.pass_s(100)
        await group.tell(idle=True)
        if not is_idle:
            await group.pass_s(1_000)
            await group.tell(idle=False)
    clock.advance(100_000)
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        check_books(group.entry)
        if is_idle:
            await group.pass_s(1_000)
            assert group.state == "open"
            await group.tell(idle=False)
        assert await group.closes_in(TIMEOUT_S - 100)


async def test_time_that_a_crash_loses_is_not_counted_for_it(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin(group_timeout_seconds=4)
        await group.sample()
        clock.advance(3)
        await group.tell(idle=True)  # nothing else is stored: the next record of the time was due later
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.pass_s(100)
        await group.tell(idle=False)
        await group.pass_s(0.5)
        assert group.state == "open"
        await group.pass_s(1)
        assert group.state == "discarded: timed_out"


async def test_all_are_idle_for_a_new_process_until_it_announces_them(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.sample()
        await fill(group.entry, 2, [0.0] * 4)  # is full: nothing will be in flight for it
        await note_new_process(group.entry.buffer)
        assert list(group.entry.buffer.groups.idle) == [group.row.group_id]
        await group.pass_s(2 * DEADLINE_S)
        assert states(group.entry) == {KEY: "open", (2, 0): "discarded: invalid"}
        await announce(group.entry.buffer, [KEY])
        assert await group.closes_in(TIMEOUT_S)


async def test_one_that_becomes_full_ages(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.tell(idle=True)
        await fill(group.entry, 1, [0.0, 1.0, 0.0, 1.0])
        await group.tell(idle=True)
        await group.pass_s(TIMEOUT_S + 1)
        assert group.state == "ready"


async def test_one_that_became_full_just_before_a_restart_ages_behind_it(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.tell(idle=True)
        await fill(group.entry, 1, [0.0, 1.0, 0.0, 1.0])
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.pass_s(TIMEOUT_S + 1)
        assert group.state == "ready"


@pytest.mark.parametrize("has_sample", [True, False])
async def test_it_ages_as_soon_as_its_process_has_ended(store: Store, clock: ManualClock, has_sample: bool) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        if has_sample:
            await group.sample()
        await group.tell(idle=True)
        await group.pass_s(10_000)
        await end_process(buffer, state=RunState.FAILED)
        assert await group.closes_in(TIMEOUT_S, is_heard=False)
        assert group.entry.run.has_ended


async def test_it_ends_with_a_run_whose_last_slot_was_reported(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.tell(idle=True)
        group.entry.run.is_last_slot_reported = True
        await end_process(buffer)
        await buffer.tick()
        assert group.state == "discarded: timed_out"


async def test_it_ages_when_its_process_is_silent_and_not_once_that_speaks_again(
    store: Store, clock: ManualClock
) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await group.sample()
        await group.tell(idle=True)
        await group.pass_s(QUIET_S + 40, is_heard=False)
        await group.pass_s(1_020)  # its first word comes after a minute
        assert group.state == "open"
        assert await group.closes_in(QUIET_S + TIMEOUT_S - 100, is_heard=False)


async def test_what_is_told_of_others_changes_nothing(store: Store, clock: ManualClock) -> None:
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin()
        await note_groups(group.entry.buffer, [(1, 7), ("1", 0)], [(1, 0), (9, 9)])
        await group.sample()
        assert await group.closes_in(TIMEOUT_S)
        await group.tell(idle=True)
        assert group.row.idle_since_s is None


ACTS = st.lists(
    st.tuples(st.sampled_from(["wait", "idle", "busy", "sample", "restart", "new process"]), st.integers(1, 50)),
    max_size=25,
)


@given(ACTS)
def test_it_is_closed_when_its_age_says_so(acts: list[tuple[str, int]]) -> None:
    asyncio.run(_compared_with_a_model(acts))


async def _compared_with_a_model(acts: list[tuple[str, int]]) -> None:
    """Seconds are counted one by one: of the group, and since its last sample."""
    store, clock = MemoryStore(), ManualClock()
    age = since_sample = 0
    is_idle = has_sample = False
    async with open_buffer(store, clock) as buffer:
        group = Group(buffer, clock)
        await group.begin(group_size=100, group_timeout_seconds=40, group_deadline_seconds=120)
    for act, seconds in [*acts, ("busy", 0), ("wait", 200)]:
        async with open_buffer(store, clock) as buffer:  # each on what the one before has stored
            group = Group(buffer, clock)
            await group.pass_s(0)
            if act == "wait":
                for _ in range(seconds):
                    await group.pass_s(1)
                    age, since_sample = (age, since_sample) if is_idle else (age + 1, since_sample + 1)
                    is_over = age >= 120 or (has_sample and since_sample >= 40)
                    assert group.state == ("discarded: timed_out" if is_over else "open")
                    if is_over:
                        return
                group.entry.buffer.record(*group.entry.buffer.run_rows())  # the time, which a crash would lose a bit of
            elif act == "sample":
                await group.sample()
                has_sample, since_sample = True, 0
            elif act == "new process":
                await note_new_process(group.entry.buffer)
                is_idle = True
            elif act != "restart":
                is_idle = act == "idle"
                await group.tell(idle=is_idle)
    raise AssertionError("it was never closed")
