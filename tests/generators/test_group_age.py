"""How old a group is in its run process, and what the buffer is told of groups without a rollout in flight."""

import asyncio

from forebay.core.clock import ActiveClock, ManualClock
from forebay.core.task_row import TaskRow
from forebay.generators.buffer_link.abc import GroupKey, Plan
from forebay.generators.job.reporter import IDLE_LASTING_S, IDLE_REPEAT_S, IdleReports
from forebay.generators.rollouts.open_group import GroupPlan, OpenGroup

PLAN = Plan("run-0123456789ab", 2, group_timeout_s=10.0, group_deadline_s=100.0)


class Timed:
    """A group, and the clock of its run."""

    def __init__(self, name: str = "a") -> None:
        self.clock = ManualClock()
        self.run_clock = ActiveClock(self.clock)
        self.run_clock.run(True)
        self.group = OpenGroup(PLAN, GroupPlan(TaskRow(0, name, [], {}), 0, (0, 1), (0, 1)), self.run_clock)

    def in_flight(self, seconds: float) -> None:
        self.group.enter()
        self.clock.advance(seconds)
        self.group.leave()


def test_the_deadline_counts_while_a_rollout_is_in_flight() -> None:
    timed = Timed()
    timed.clock.advance(1_000)
    assert (timed.group.is_idle, timed.group.left_s()) == (True, 100.0)
    timed.in_flight(30)
    timed.clock.advance(1_000)
    assert timed.group.left_s() == 70.0
    timed.group.enter()
    timed.in_flight(20)  # two at once count once
    timed.clock.advance(10)
    assert (timed.group.is_idle, timed.group.left_s()) == (False, 40.0)
    timed.clock.advance(40)
    assert timed.group.left_s() == 0.0


def test_so_does_the_time_after_a_sample() -> None:
    timed = Timed()
    timed.in_flight(30)
    timed.group.note_sample()
    timed.clock.advance(1_000)
    assert timed.group.left_s() == 10.0
    timed.in_flight(4)
    timed.group.note_sample()
    timed.in_flight(7)
    assert timed.group.left_s() == 3.0


def test_a_run_that_stands_still_ages_no_group() -> None:
    timed = Timed()
    timed.group.enter()
    timed.run_clock.run(False)
    timed.clock.advance(1_000)
    assert timed.group.left_s() == 100.0


def test_what_begins_afresh_is_as_old_as_before() -> None:
    timed = Timed()
    timed.in_flight(30)
    timed.group.enter()
    timed.clock.advance(5)
    fresh = timed.group.afresh()
    timed.clock.advance(1_000)
    assert (fresh.is_idle, fresh.left_s()) == (True, 65.0)


async def test_it_expires_only_once_a_rollout_is_in_flight() -> None:
    timed = Timed()
    timed.in_flight(100)
    expiry = asyncio.create_task(timed.group.wait_expired())
    await asyncio.sleep(0)
    assert expiry.done()  # its time was up before
    timed = Timed()
    timed.in_flight(99)
    expiry = asyncio.create_task(timed.group.wait_expired())
    timed.clock.advance(1_000)
    await asyncio.sleep(0.1)
    assert not expiry.done()
    timed.group.enter()
    timed.clock.advance(1)
    async with asyncio.timeout(30):
        assert await expiry


class Reports:
    """Takes what is due at once, as a reporter does whose buffer answers at once."""

    def __init__(self) -> None:
        self.told: list[tuple[list[GroupKey], list[GroupKey]]] = []
        self.is_held_up = False
        self.news = asyncio.Event()
        self.reports = IdleReports(self.due)

    def due(self) -> None:
        if not self.is_held_up:
            self.told.append(tuple(map(list, self.reports.take())))  # type: ignore[arg-type]
            self.news.set()

    async def next(self) -> tuple[list[GroupKey], list[GroupKey]]:
        self.news.clear()
        async with asyncio.timeout(30):
            await self.news.wait()
        return self.told[-1]

    def watch(self, *timed: Timed) -> None:
        for each in timed:
            each.group.on_change = self.reports.note
            self.reports.note(each.group)


async def test_what_lasts_is_told_in_one_report() -> None:
    reports, a, b, c = Reports(), Timed("a"), Timed("b"), Timed("c")
    c.group.enter()
    reports.watch(a, b, c)
    assert await reports.next() == ([("a", 0), ("b", 0)], [])
    assert reports.reports.repeat_s == IDLE_REPEAT_S
    c.group.leave()
    a.group.enter()
    assert await reports.next() == ([("c", 0)], [("a", 0)])
    c.group.enter()
    b.group.shut()  # it needs no rollouts any more, and is left to the buffer
    assert await reports.next() == ([], [("c", 0), ("b", 0)])
    assert reports.reports.repeat_s is None


async def test_a_rollout_that_follows_at_once_is_not_told() -> None:
    reports, busy, idle = Reports(), Timed("busy"), Timed("idle")
    busy.group.enter()
    reports.watch(busy, idle)
    for _ in range(200):
        busy.group.leave()
        busy.group.enter()
        await asyncio.sleep(IDLE_LASTING_S / 100)
    assert reports.told == [([("idle", 0)], [])]


async def test_what_changes_back_while_a_report_is_under_way_is_not_told() -> None:
    reports, a, b = Reports(), Timed("a"), Timed("b")
    reports.is_held_up = True
    reports.watch(a, b)
    await asyncio.sleep(3 * IDLE_LASTING_S)
    a.group.enter()
    reports.is_held_up = False
    reports.due()
    assert reports.told == [([("b", 0)], [])]


async def test_of_a_group_that_begins_afresh_the_last_counts() -> None:
    reports, timed = Reports(), Timed("a")
    timed.group.enter()
    reports.watch(timed)
    fresh = timed.group.afresh()
    timed.group.shut()
    fresh.on_change = reports.reports.note
    reports.reports.note(fresh)
    timed.group.leave()
    assert await reports.next() == ([("a", 0)], [])
