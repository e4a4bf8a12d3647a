"""What a worker group costs: ``MAP`` beside the standard library's pool of processes, in one run."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from forebay.workers.groups import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from tests.benchmarks.machines import show

pytestmark = pytest.mark.bench

NUM_ITEMS = 2_000
ITEM_S = 0.005
NUM_WORKERS = 2
NUM_ROUNDS = 3
LEAST = 0.9


def busy(number: int) -> int:
    """Five milliseconds in which others may run."""
    time.sleep(ITEM_S)
    return number * number


class Busy(Worker):
    @register(Dispatch.MAP)
    def square(self, number: int) -> int:
        return busy(number)


def items_per_s(work: Callable[[], list[int]]) -> float:
    begun_s = time.perf_counter()
    assert work() == [number * number for number in range(NUM_ITEMS)]
    return NUM_ITEMS / (time.perf_counter() - begun_s)


def test_map_goes_as_fast_as_a_pool_of_processes() -> None:
    of_pool, of_group = list[float](), list[float]()
    with (
        ProcessPoolExecutor(NUM_WORKERS, get_context("spawn")) as pool,
        WorkerGroup([NUM_WORKERS], ClassWithInitArgs(Busy), backend="processes") as group,
    ):
        list(pool.map(busy, range(2 * NUM_WORKERS)))  # its processes start with their first items
        for _ in range(NUM_ROUNDS):
            of_pool.append(items_per_s(lambda: list(pool.map(busy, range(NUM_ITEMS)))))
            of_group.append(items_per_s(lambda: group.square(range(NUM_ITEMS)).get()))
    ratio = max(of_group) / max(of_pool)
    title = f"MAP of {NUM_ITEMS} items of {ITEM_S * 1e3:g} ms over {NUM_WORKERS} workers"
    show(title, ("pool/s", "group/s", "ratio"), [(f"{max(of_pool):.0f}", f"{max(of_group):.0f}", f"{ratio:.3f}")])
    assert ratio >= LEAST
