"""What worker groups promise, on every backend."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.groups import (
    Call,
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    WorkerFailed,
    WorkerGroup,
    register_dispatch_mode,
)
from tests.kit import poll_until
from tests.worker_groups_kit import Distributed, Member, as_they_are, two_to_all

WAIT_S = 60.0
MakeGroup = Callable[..., WorkerGroup]


@pytest.fixture(scope="module")
def two(backend: str) -> Iterator[WorkerGroup]:
    with WorkerGroup([2], ClassWithInitArgs(Member, 10), backend=backend) as group:
        yield group


@pytest.fixture(scope="module")
def four(backend: str) -> Iterator[WorkerGroup]:
    pool = ResourcePool([4], cpus=0.1)
    with WorkerGroup(pool, ClassWithInitArgs(Member, number=2), backend=backend) as group:
        yield group


# -- dispatch and execute


def test_data_is_split_over_two_workers_and_joined_in_order(two: WorkerGroup) -> None:
    assert two.add([0, 1, 2, 3]) == [10, 11, 13, 14]


def test_an_async_method_that_does_not_block_gives_a_future(make_group: MakeGroup) -> None:
    group = make_group(2, ClassWithInitArgs(Member, 5))
    call = group.twice([0, 1, 2, 3])
    assert isinstance(call, Call)
    assert call.get(WAIT_S) == [5, 7, 10, 12]
    assert call.get() == [5, 7, 10, 12]
    assert call.done


async def test_a_call_can_be_awaited(two: WorkerGroup) -> None:
    assert await two.twice([0, 1, 2, 3]) == [10, 12, 15, 17]
    assert await asyncio.gather(two.twice([1]), two.twice([2])) == [[12], [14]]


def test_one_call_on_the_group_is_one_on_each_worker(four: WorkerGroup) -> None:
    assert four.execute_all_sync("foo", 3) == [5] * 4
    assert four.foo(3) == [5] * 4
    assert four.foo(number=3) == [5] * 4


def test_one_value_for_each_worker(four: WorkerGroup) -> None:
    x, y = [1, 2, 3, 4], [5, 6, 7, 8]
    assert four.sum_up(x, y) == [8, 10, 12, 14]
    assert four.sum_up(x=x, y=y) == [8, 10, 12, 14]
    assert four.sum_of_dp(tuple(x), y=y) == [8, 10, 12, 14]
    assert (x, y) == ([1, 2, 3, 4], [5, 6, 7, 8])


@pytest.mark.parametrize(
    ("x", "given"), [([1, 2, 3], "3 values"), (3, "int"), ("abcd", "str"), (np.arange(4), "ndarray")]
)
def test_what_is_not_one_value_for_each_worker_is_refused(four: WorkerGroup, x: Any, given: str) -> None:
    with pytest.raises(
        InvalidInput, match=f"argument x must be a list with one value .* 4 workers, and is {given}"
    ) as e:
        four.sum_up(x=x, y=[5, 6, 7, 8])
    assert e.value.field == "x"
    assert "ONE_TO_ALL" in e.value.hint


def test_a_dispatch_of_ones_own(four: WorkerGroup) -> None:
    assert four.sum_of_two(x=[1, 2], y=[5, 6]) == [8, 10, 8, 10]
    assert four.sum_of_two([1, 2], y=[5, 6]) == [8, 10, 8, 10]
    assert four.first_of_two([1, 2]) == [1]


def test_a_dispatch_mode_can_be_registered_and_removed(make_group: MakeGroup) -> None:
    from forebay.workers.groups import register

    mode = register_dispatch_mode("TWO_TO_ALL_HERE", two_to_all, as_they_are)
    try:

        class OfTwo(Member):
            @register(mode)
            def sum_registered(self, x: int, y: int) -> int:
                return self.number + x + y

        group = make_group(1, ClassWithInitArgs(OfTwo, 2))
        assert Dispatch.TWO_TO_ALL_HERE is mode
        assert group.sum_registered(x=[1, 2], y=[5, 6]) == [8]
    finally:
        Dispatch.remove("TWO_TO_ALL_HERE")
    assert "TWO_TO_ALL_HERE" not in Dispatch
    assert group.sum_registered([1, 2], [5, 6]) == [8]


@pytest.mark.parametrize(
    ("length", "sizes"), [(0, [0]), (1, [1]), (3, [1, 1, 1]), (8, [2, 2, 2, 2]), (10, [3, 3, 2, 2])]
)
def test_uneven_lengths_are_split_without_padding(four: WorkerGroup, length: int, sizes: list[int]) -> None:
    numbers = list(range(length))
    assert four.share(numbers) == list(enumerate(sizes))
    assert four.share(numbers=numbers) == list(enumerate(sizes))
    assert numbers == list(range(length))
    joined = four.add(numbers=numbers)
    ranks = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    assert joined == [2 + rank + number for rank, number in zip(ranks, numbers, strict=True)]


@pytest.mark.parametrize("length", [0, 1, 8, 10])
def test_arrays_and_mappings_are_split_and_the_callers_stay_as_they_are(four: WorkerGroup, length: int) -> None:
    numbers = np.arange(length)
    ranks = np.repeat(np.arange(4), [len(part) for part in np.array_split(numbers, 4)])
    assert four.add(numbers).tolist() == (numbers + 2 + ranks).tolist()
    assert numbers.tolist() == list(range(length))
    batch = {"x": np.arange(length), "rows": tuple(range(length))}
    result = four.by_key(batch, weights=np.ones(length))
    assert result["sums"].tolist() == [number + 1.0 for number in range(length)]
    assert result["rows"] == list(zip(ranks.tolist(), range(length), strict=True))
    assert list(batch) == ["x", "rows"]


def test_results_that_cannot_be_joined_are_a_list(four: WorkerGroup) -> None:
    assert four.largest([1, 2, 3, 4, 5]) == [2, 3, 4, 5]
    assert four.mean([1, 3, 5, 7]) == [1.0, 3.0, 5.0, 7.0]
    assert four.mean([1, 3]) == [1.0, 3.0]


def test_a_function_of_the_driver_runs_on_every_share(four: WorkerGroup) -> None:
    base = 100

    def function(number: int) -> int:
        return base + number * 3

    numbers = list(range(10))
    assert four.apply(function, numbers) == [function(number) for number in numbers]
    assert four.apply(function, []) == []
    with pytest.raises(InvalidInput, match="first argument must be a function"):
        four.apply(numbers)


def test_what_cannot_be_split_is_refused_by_name(four: WorkerGroup) -> None:
    with pytest.raises(InvalidInput, match="argument numbers cannot be split: int") as e:
        four.share(numbers=3)
    assert e.value.field == "numbers"
    with pytest.raises(InvalidInput, match="argument weights has length 3, those before it have 4"):
        four.by_key({"x": np.arange(4), "rows": [1, 2, 3, 4]}, weights=np.ones(3))


def test_a_list_as_long_as_the_group_arrives_whole(four: WorkerGroup) -> None:
    assert four.whole([1, 2, 3, 4]) == [[1, 2, 3, 4]] * 4
    assert four.whole(value=[1, 2, 3, 4]) == [[1, 2, 3, 4]] * 4


def test_rank_zero_takes_arguments_as_they_are(four: WorkerGroup) -> None:
    assert four.of_rank_zero(3, y=4) == (0, 3, 4)
    assert four.execute_rank_zero_sync("unregistered", 3) == 5
    assert four.execute_rank_zero("unregistered", 3).get(WAIT_S) == 5
    assert four.execute_rank_zero_async("unregistered", number=3).get(WAIT_S) == 5
    assert four.execute_rank(3, "place").get(WAIT_S)["rank"] == 3


def test_any_takes_the_least_busy_worker(four: WorkerGroup) -> None:
    calls = [four.anywhere(3) for _ in range(4)]  # none ends before the last one begins, on a busy machine either
    assert sorted(call.get(WAIT_S) for call in calls) == [0, 1, 2, 3]


def test_any_method_can_be_executed_on_all_and_a_function_on_rank_zero(four: WorkerGroup) -> None:
    assert four.execute_all("unregistered", 1).get(WAIT_S) == [3] * 4
    assert four.execute_all_async("unregistered", number=1).get(WAIT_S) == [3] * 4
    offset = 7
    assert four.execute_func_rank_zero(lambda worker, more: (worker.rank, worker.number + offset + more), 1) == (0, 10)


# -- futures


def test_calls_are_arguments_of_other_calls(two: WorkerGroup, four: WorkerGroup) -> None:
    numbers = [0, 1, 2, 3]
    blocking = four.add(two.add(two.twice(numbers).get(WAIT_S)))
    assert four.add(two.add(two.twice(numbers))) == blocking
    assert four.add_when_there(two.add_when_there(two.twice(numbers))).get(WAIT_S) == blocking
    assert four.add(numbers=two.twice(numbers)) == four.add(two.twice(numbers).get(WAIT_S))
    assert four.whole([two.twice([1]), 5]) == [[[12], 5]] * 4


def test_a_call_that_waits_for_another_returns_at_once(two: WorkerGroup, four: WorkerGroup) -> None:
    waiting = two.forever()
    chained = four.add_when_there(waiting)
    assert not chained.done
    assert waiting.cancel()
    with pytest.raises(CancelledError):
        chained.get(WAIT_S)


def test_a_future_says_when_it_takes_too_long_and_goes_on(two: WorkerGroup) -> None:
    call = two.nap(0.3)
    with pytest.raises(TimeoutError, match="nap has not ended after 0 s, and goes on"):
        call.get(timeout_s=0.0)
    assert call.get(WAIT_S) == ["napped"] * 2


def test_a_cancelled_call_is_cancelled_on_the_workers(make_group: MakeGroup) -> None:
    group = make_group(2)
    call = group.forever()
    assert poll_until(lambda: group.seen() == [["begun"]] * 2)
    assert call.cancel()
    with pytest.raises(CancelledError):
        call.get(WAIT_S)
    assert poll_until(lambda: group.seen() == [["begun", "cancelled"]] * 2)


# -- errors, deadlines, retries


def test_one_error_holds_the_traceback_of_every_rank_that_failed(four: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed) as e:
        four.fail_on([1, 3])
    assert sorted(e.value.traces) == [1, 3]
    assert e.value.message.startswith("fail_on failed on rank 1, 3:\n--- rank 1 of 4\nTraceback")
    for rank, trace in e.value.traces.items():
        assert f"KeyError: 'broken on {rank}'" in trace
        assert "worker_groups_kit.py" in trace
        assert "host.py" not in trace
    assert isinstance(e.value.__cause__, KeyError)
    assert four.fail_on([]) == [0, 1, 2, 3]


def test_a_method_is_repeated_as_often_as_it_says(make_group: MakeGroup) -> None:
    group = make_group(2)
    with pytest.raises(WorkerFailed, match="refused, time 1"):  # the caller's mistake stays one
        group.refuse()
    assert group.execute_all_sync("tries_so_far") == [1, 1]
    assert make_group().third_time() == [3]


def test_a_call_ends_at_its_deadline_repeated_or_not(four: WorkerGroup) -> None:
    with pytest.raises(TimeoutError, match=r"never took longer than 0\.2 s \(rank 0, 1, 2, 3\)"):
        four.never()
    with pytest.raises(TimeoutError, match=r"never_well took longer than 0\.2 s"):
        four.never_well()


def test_what_cannot_be_pickled_is_refused_by_its_name(two: WorkerGroup, backend: str) -> None:
    if backend == "inline":
        pytest.skip("nothing is pickled in one process")
    with pytest.raises(InvalidInput, match="value") as e:
        two.echo(threading.Lock())
    assert e.value.field == "value"
    with pytest.raises(InvalidInput, match="a_lock"):
        two.a_lock()
    assert two.echo(1) == [1, 1]


# -- what a group is made of


def test_workers_are_made_where_they_run(four: WorkerGroup, backend: str) -> None:
    places = four.place()
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert {place["world_size"] for place in places} == {4}
    assert all(place["made_in"] == place["pid"] for place in places)
    if backend == "inline":
        assert {place["pid"] for place in places} == {os.getpid()}
    else:
        assert len({os.getpid(), *(place["pid"] for place in places)}) == 5
    vitals = four.vitals
    assert list(vitals) == [0, 1, 2, 3]
    assert [vitals[rank].pid for rank in vitals] == [place["pid"] for place in places]


def test_a_name_without_register_is_said_so(four: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"Member\.unregistered is not registered: put @register"):
        four.unregistered(3)
    with pytest.raises(AttributeError, match=r"no 'nothing'; its methods with @register: .*add"):
        four.nothing()
    with pytest.raises(AttributeError, match="Member has no method broken"):
        four.execute_all_sync("broken")


# -- MAP


def test_map_gives_results_as_they_finish_and_in_order(four: WorkerGroup) -> None:
    results = four.square(range(50), plus=1)
    assert sorted(results) == [(number, number * number + 1) for number in range(50)]
    assert list(results) == []
    assert four.square(range(50)).get(WAIT_S) == [number * number for number in range(50)]
    assert four.square([]).get(WAIT_S) == []


async def test_map_can_be_awaited_and_iterated_asynchronously(four: WorkerGroup) -> None:
    assert sorted([each async for each in four.square_later(range(20))]) == [(n, n * n) for n in range(20)]
    assert await four.square_later(range(20)) == [n * n for n in range(20)]


def test_an_idle_worker_takes_the_next_item(two: WorkerGroup) -> None:
    # One worker is busy for as long as the test likes: the other one does all items.
    long = two.execute_rank(0, "forever")
    assert two.where(range(10)).get(WAIT_S) == [1] * 10
    assert not long.done
    long.cancel()


def test_map_pulls_no_more_input_than_somebody_takes(two: WorkerGroup) -> None:
    pulled: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(1_000):
            pulled.append(number)
            yield number

    results = two.square(numbers())
    assert poll_until(lambda: len(pulled) >= 5)
    taken = iter(results)
    for _ in range(100):
        next(taken)
    # What is taken, what may wait for that (2 for each worker, and the one above that stops it), what is in flight.
    assert poll_until(lambda: len(pulled) >= 105)
    assert len(pulled) <= 100 + 2 * 2 + 1 + 2
    assert results.cancel()
    with pytest.raises(CancelledError):
        next(taken)


def test_an_item_that_fails_ends_the_map(four: WorkerGroup) -> None:
    seen = []
    with pytest.raises(WorkerFailed, match="ValueError: not 7"):  # noqa: PT012 - raised while iterating
        for index, value in four.square_unless(iter(range(10_000)), 7):
            seen.append((index, value))
    assert all(value == index * index for index, value in seen)
    assert len(seen) < 5_000


def test_an_item_is_tried_again_on_another_worker(two: WorkerGroup) -> None:
    assert two.where_it_is_not(range(8), rank=1).get(WAIT_S) == list(range(8))
    with pytest.raises(InvalidInput, match="int cannot be iterated"):
        two.square(3)


def test_map_takes_calls_as_its_input(two: WorkerGroup) -> None:
    assert two.square(two.twice([0, 1])).get(WAIT_S) == [100, 13 * 13]


def test_execute_all_gives_each_worker_its_item_of_lists_as_long_as_the_group(four: WorkerGroup) -> None:
    assert four.execute_all_sync("echo", [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert four.execute_all_sync("sum_up", [1, 2, 3, 4], y=[5, 6, 7, 8]) == [8, 10, 12, 14]
    assert four.execute_all_sync("echo", [1, 2, 3]) == [[1, 2, 3]] * 4
    assert four.execute_all_sync("foo", 3) == [5] * 4


# -- torch.distributed


def test_workers_find_each_other_by_their_environment(make_group: MakeGroup) -> None:
    group = make_group(2, ClassWithInitArgs(Distributed))
    found = group.variables()
    assert [each["RANK"] for each in found] == [each["LOCAL_RANK"] for each in found] == ["0", "1"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in found} == {("2", "2")}
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found}) == 1
    assert group.rank_at_first() == ["0", "1"]


def test_torch_distributed_works_in_a_group(make_group: MakeGroup, backend: str) -> None:
    size = 1 if backend == "inline" else 2  # inline, one worker at a time runs
    group = make_group(size, ClassWithInitArgs(Distributed))
    assert group.sum_of_ranks() == [sum(range(size))] * size
