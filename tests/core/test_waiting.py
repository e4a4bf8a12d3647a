"""Signals, deadline and clocks."""

import asyncio

from forebay.core.backoff import Deadline
from forebay.core.clock import ActiveClock, ManualClock, SystemClock
from forebay.core.waiting import Signal


async def test_notification_wakes_everybody_who_waits() -> None:
    signal = Signal()
    waiting = [asyncio.create_task(signal.wait(5)) for _ in range(3)]
    await asyncio.sleep(0)
    assert signal.has_waiters
    signal.notify()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert not signal.has_waiters


async def test_without_a_limit_only_notification_and_closing_end_a_wait() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    signal.notify()
    assert await waiting
    signal.close()
    assert not await signal.wait()


async def test_notification_of_before_wakes_nobody_but_is_counted() -> None:
    signal = Signal()
    signal.notify()
    assert signal.count == 1
    assert not await signal.wait(0.001)


async def test_waiter_that_is_cancelled_is_forgotten() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait(5))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not signal.has_waiters
    signal.notify()


async def test_notification_wakes_in_the_order_of_waiting() -> None:
    signal, woken = Signal(), list[int]()

    async def wait(number: int) -> None:
        await signal.wait(5)
        woken.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(20)]
    await asyncio.sleep(0)
    signal.notify()
    await asyncio.gather(*waiting)
    assert woken == list(range(20))


async def test_patience_ends() -> None:
    signal = Signal()
    assert not await Deadline(0.0).wait(signal)
    assert not await Deadline(-1.0).wait(signal)
    deadline = Deadline(0.002)
    assert not await deadline.wait(signal)
    assert deadline.left_s <= 0


async def test_patience_is_used_up_by_all_waits_together() -> None:
    signal, deadline = Signal(), Deadline(5)
    for _ in range(2):
        before_s = deadline.left_s
        waiting = asyncio.create_task(deadline.wait(signal))
        await asyncio.sleep(0.001)
        signal.notify()
        assert await waiting
        assert deadline.left_s < before_s


def test_active_clock_stands_still_while_held() -> None:
    clock = ManualClock()
    active = ActiveClock(clock, counted_s=10.0)
    clock.advance(5)
    assert active.now_s() == 10.0
    active.run(True)
    active.run(True)
    clock.advance(5)
    assert active.now_s() == 15.0
    active.run(False)
    active.run(False)
    clock.advance(5)
    assert active.now_s() == 15.0


def test_system_clock_goes_forward() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1_700_000_000
