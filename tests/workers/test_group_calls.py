"""Calls, results and ends of worker groups, seen closely on workers in this process."""

import asyncio
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.backends.inline import InlineWorker
from forebay.workers.groups import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    Worker,
    WorkerError,
    WorkerFailed,
    WorkerGroup,
    WorkerLost,
    register,
)
from tests.kit import poll_until

WAIT_S = 30.0


class Doer(Worker):
    def __init__(self, fails_on: int = -1) -> None:
        if self.rank == fails_on:
            raise LookupError("no weights")
        self.tries = 0

    @register(Dispatch.MAP)
    def square(self, number: int) -> int:
        return number * number

    @register(Dispatch.MAP, materialize_futures=False)
    def plus(self, number: int, other: int) -> int:
        return number + other

    @register(Dispatch.MAP)
    async def wait_for(self, number: int) -> int:
        await asyncio.Event().wait()
        return number

    @register(Dispatch.ONE_TO_ALL, blocking=False, materialize_futures=False)
    def same(self, value: Any) -> Any:
        return value

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def forever(self) -> None:
        await asyncio.Event().wait()

    @register(Dispatch.ONE_TO_ALL, Execute.ANY, retries=1)
    def anywhere_but(self, rank: int) -> int:
        if self.rank == rank:
            raise ConnectionError("not here")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def thread(self) -> int:
        return threading.get_ident()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ConnectionError("of a database")

    @register(Dispatch.ONE_TO_ALL)
    def interrupt(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup([2], ClassWithInitArgs(Doer), backend="inline") as made:
        yield made


def backend_workers(group: WorkerGroup) -> list[InlineWorker]:
    return [group._workers._workers[rank] for rank in range(group.world_size)]  # type: ignore[misc]


def test_a_debugger_of_the_caller_sees_the_method(group: WorkerGroup) -> None:
    assert group.thread() == [threading.get_ident()] * 2
    with pytest.raises(WorkerFailed) as e:
        group.fail()
    cause = e.value.__cause__
    assert isinstance(cause, ConnectionError)
    assert cause.__traceback__ is not None
    with pytest.raises(KeyboardInterrupt):
        group.interrupt()


def test_a_call_says_what_it_is_and_does_not_travel(group: WorkerGroup) -> None:
    call = group.forever()
    assert repr(call) == "<Call of forever, on its way>"
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        pickle.dumps(call)
    call.cancel()
    assert repr(call) == "<Call of forever, ended>"
    assert not call.cancel() or call.done


async def test_whoever_is_cancelled_while_it_awaits_cancels_the_call(group: WorkerGroup) -> None:
    call = group.forever()

    async def wait() -> None:
        await call

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.done


def test_what_an_argument_failed_with_is_what_the_call_fails_with(group: WorkerGroup) -> None:
    failing = group.execute_all_async("fail")
    with pytest.raises(WorkerFailed, match="of a database"):
        group.same(failing).get(WAIT_S)
    with pytest.raises(WorkerFailed, match="of a database"):
        group.same({"inside": failing}).get(WAIT_S)
    waiting = group.same(value=(group.same(3), 4))
    assert waiting.get(WAIT_S) == [([3, 3], 4)] * 2


def test_a_call_that_waits_for_its_arguments_can_be_cancelled(group: WorkerGroup) -> None:
    first = group.forever()
    second = group.same(first)
    assert second.cancel()
    with pytest.raises(CancelledError):
        second.get(WAIT_S)
    assert not first.done
    first.cancel()


def test_any_goes_on_elsewhere(group: WorkerGroup) -> None:
    assert [group.anywhere_but(rank) for rank in (0, 1)] == [1, 0]


def test_a_group_can_be_had_before_its_workers_are_made() -> None:
    with WorkerGroup([2], ClassWithInitArgs(Doer, fails_on=1), backend="inline", wait_started=False) as group:
        assert group.started(0).exception(WAIT_S) is None
        assert group.started(1).exception(WAIT_S) is not None
        assert group.execute_rank(0, "square", 3).get(WAIT_S) == 9
        with pytest.raises(WorkerFailed, match="no weights"):
            group.thread()
        assert group.lost == {1: "its classes could not be constructed"}
        assert group.square(range(5)).get(WAIT_S) == [0, 1, 4, 9, 16]  # by the one that is there


def test_losses_are_told_to_who_asks_late_too(group: WorkerGroup) -> None:
    lost: list[tuple[int, str]] = []
    backend_workers(group)[1].kill()
    group.on_lost(lambda rank, reason: lost.append((rank, reason)))
    group.on_lost(lambda rank, reason: lost.append((rank, reason)))
    assert lost == [(1, "it was killed")] * 2
    group.replace(0).result(WAIT_S)
    assert len(lost) == 2  # nobody lost it
    group.replace(1).result(WAIT_S)
    backend_workers(group)[1].kill()
    assert poll_until(lambda: lost[2:] == [(1, "it was killed")] * 2)


# -- MAP


def test_map_waits_for_its_items_where_it_may(group: WorkerGroup) -> None:
    results = group.plus(group.same(1), other=group.execute_rank_zero("square", 3))
    assert results.get(WAIT_S) == [10, 10]
    assert results.get(WAIT_S) == [10, 10]
    assert results.done


def test_a_map_that_takes_too_long_goes_on(group: WorkerGroup) -> None:
    gate = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        gate.wait(WAIT_S)
        yield 2

    results = group.square(numbers())
    with pytest.raises(TimeoutError, match="square has not ended in time"):
        results.get(0.05)
    gate.set()
    assert results.get(WAIT_S) == [1, 4]


def test_what_the_input_raises_is_raised_to_the_one_who_takes(group: WorkerGroup) -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise LookupError("no more rows")

    results, taken = group.square(numbers()), list[Any]()
    with pytest.raises(LookupError, match="no more rows"):
        taken.extend(results)
    assert list(results) == []
    with pytest.raises(InvalidInput, match="by position: there is none"):
        group.square(number=[1])


def test_what_an_argument_failed_with_is_what_a_map_fails_with(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed, match="of a database"):
        group.plus(range(3), other=group.execute_all_async("fail")).get(WAIT_S)
    with pytest.raises(WorkerFailed, match="of a database"):
        group.plus(group.execute_all_async("fail"), other=1).get(WAIT_S)


def test_a_map_whose_results_nobody_can_take_pulls_no_more(group: WorkerGroup) -> None:
    ended = threading.Event()

    def numbers() -> Iterator[int]:
        try:
            number = 0
            while True:
                yield (number := number + 1)
        finally:
            ended.set()

    results = group.square(numbers())
    next(iter(results))
    del results
    gc.collect()
    assert ended.wait(WAIT_S)


async def test_a_cancelled_map_cancels_what_is_in_flight(group: WorkerGroup) -> None:
    results = group.wait_for(range(10))
    waiting = asyncio.create_task(anext(aiter(results)))
    await asyncio.sleep(0)
    assert results.cancel()
    assert not results.cancel()
    with pytest.raises(CancelledError):
        await waiting
    assert results.done


def test_a_map_ends_with_its_group(group: WorkerGroup) -> None:
    def numbers() -> Iterator[int]:
        number = 0
        while True:
            yield (number := number + 1)

    results = iter(group.square(numbers()))
    next(results)
    group.close()
    with pytest.raises(WorkerError, match="the group is closed"):
        list(results)


def test_a_map_ends_when_every_worker_is_lost(group: WorkerGroup) -> None:
    for worker in backend_workers(group):
        worker.kill()
    with pytest.raises(WorkerLost, match="worker 0 is lost: it was killed"):
        group.square(range(10)).get(WAIT_S)


def test_a_closed_group_starts_nothing_anew(group: WorkerGroup) -> None:
    group.close()
    with pytest.raises(WorkerError, match="the group is closed"):
        group.replace(0)


def test_closing_waits_no_longer_than_it_is_told(group: WorkerGroup) -> None:
    call = group.forever()
    group.close(drain_s=0.05)
    with pytest.raises((WorkerError, CancelledError)):
        call.get(WAIT_S)


def test_vitals_are_those_of_this_process(group: WorkerGroup) -> None:
    assert {each.pid for each in group.vitals.values()} == {os.getpid()}
    assert poll_until(lambda: all(each.blocked_s == 0.0 for each in group.vitals.values()))
