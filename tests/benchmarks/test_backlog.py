"""Reads, writes and memory with a large backlog, against a small one."""

from collections.abc import Callable
from statistics import median

import psutil
import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import Cpu, request_seconds, show
from tests.conftest import MakeServer

pytestmark = pytest.mark.bench

ROUNDS = 5
SMALL, LARGE = 1_000, 200_000
NUM_WRITES = 2_000
GROUPS_PER_READ = 100
MAX_RATIO = 1.3
MAX_BYTES_PER_SAMPLE = 1_024


def test_a_large_backlog_costs_neither_time_nor_much_memory(make_server: MakeServer) -> None:
    server = make_server(log_level="warning")
    run = server.start_slime("backlog", group_size=8)
    process = psutil.Process(server.pid)

    def requests(first: int, count: int, prefix: str = "") -> list[bytes]:
        return [post(f"{run.prefix}/buffer/write", sample_body(first + i, 4_000, prefix=prefix)) for i in range(count)]

    def fill(first: int, count: int) -> None:
        for at in range(first, first + count, 5_000):
            batch = requests(at, min(5_000, first + count - at))
            send(server.url, batch.__getitem__, len(batch), 32)

    fill(0, SMALL)
    small_write, small_read = _measure(server.url, server.pid, run.path, requests, "s")
    before = process.memory_info().rss
    fill(SMALL, LARGE)
    memory = (process.memory_info().rss - before) / LARGE
    large_write, large_read = _measure(server.url, server.pid, run.path, requests, "l")
    rows = [
        ("write, µs of CPU", small_write, large_write, large_write / small_write, MAX_RATIO),
        ("read, ms", small_read, large_read, large_read / small_read, MAX_RATIO),
        ("memory per sample, bytes", "", memory, "", MAX_BYTES_PER_SAMPLE),
    ]
    show("A backlog of 4 KB samples", ("", f"{SMALL:,}", f"{LARGE:,}", "ratio", "target"), rows)
    assert large_write / small_write <= MAX_RATIO
    assert large_read / small_read <= MAX_RATIO
    assert memory <= MAX_BYTES_PER_SAMPLE


def _measure(
    url: str, pid: int, path: str, requests: Callable[[int, int, str], list[bytes]], prefix: str
) -> tuple[float, float]:
    """CPU of a write in µs, and time of a read in ms; each round reads as much as it wrote."""
    writes, reads = [], []
    read = post(f"{path}/batches", b'{"num_groups": %d}' % GROUPS_PER_READ)
    for turn in range(ROUNDS):
        batch = requests(turn * NUM_WRITES, NUM_WRITES, f"{prefix}{turn}-")
        cpu = Cpu(pid)
        send(url, batch.__getitem__, len(batch), 64)
        writes.append(cpu.used_s / NUM_WRITES * 1e6)
        took = [request_seconds(url, read)[0] for _ in range(NUM_WRITES // 8 // GROUPS_PER_READ)]
        reads.append(median(took) * 1e3)
    return median(writes), median(reads)
