"""CPU of a write, against a bare uvicorn app that reads the same body."""

from statistics import median

import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import Cpu, floor_server, show
from tests.conftest import MakeServer
from tests.kit import poll_until

pytestmark = pytest.mark.bench

ROUNDS = 5
NUM_WRITES = {4: 4_000, 32: 2_000, 128: 600}
CONCURRENCIES = (1, 16, 64)
TARGETS_AT_64 = {4: 4.0, 32: 6.0, 128: 8.0}


def test_a_write_costs_a_small_multiple_of_reading_its_body(make_server: MakeServer) -> None:
    server = make_server(log_level="warning")
    rows = []
    with floor_server() as (floor_url, floor_pid):
        for kilobytes, num_writes in NUM_WRITES.items():
            for concurrency in CONCURRENCIES:
                floors, ours = [], []
                for turn in range(ROUNDS):
                    run = server.start_slime(f"{kilobytes}-{concurrency}-{turn}", group_size=8)
                    # Starting the run's process is no part of a write, but is paid by the same process.
                    poll_until(lambda run=run: run.view()["state"] == "running")
                    prefix = f"{kilobytes}-{concurrency}-{turn}-"
                    requests = [
                        post(f"{run.prefix}/buffer/write", sample_body(i, kilobytes * 1_000, prefix=prefix))
                        for i in range(num_writes)
                    ]
                    floors.append(_cpu_us(floor_url, floor_pid, requests, concurrency))
                    ours.append(_cpu_us(server.url, server.pid, requests, concurrency))
                ratio = median(ours) / median(floors)
                target = TARGETS_AT_64[kilobytes] if concurrency == 64 else None
                rows.append((f"{kilobytes} KB", concurrency, median(floors), median(ours), ratio, target or ""))
    show("CPU per write", ("sample", "writers", "floor, µs", "forebay, µs", "ratio", "target"), rows)
    missed = [row for row in rows if row[5] and row[4] > row[5]]
    assert not missed


def _cpu_us(url: str, pid: int, requests: list[bytes], concurrency: int) -> float:
    cpu = Cpu(pid)
    send(url, requests.__getitem__, len(requests), concurrency)
    return cpu.used_s / len(requests) * 1e6
