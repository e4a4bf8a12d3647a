"""What one server can take: rollouts that are written, delivered and acknowledged, all at the same time."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import Cpu, show
from tests.conftest import MakeServer
from tests.kit import NativeRun

pytestmark = pytest.mark.bench

NUM_ROLLOUTS = {4: 65_536, 32: 16_384, 128: 4_096}
AT_ONCE = 64
GROUP_SIZE = 8
NUM_WRITERS = 8


def test_rollouts_per_second_and_bytes_per_day(make_server: MakeServer) -> None:
    rows = []
    for kilobytes, num_rollouts in NUM_ROLLOUTS.items():
        server = make_server(log_level="warning")
        run = server.start_run(group_size=GROUP_SIZE)
        write = partial(_written, run.path, kilobytes * 1_000)
        num_bytes = num_rollouts * len(sample_body(0, kilobytes * 1_000))
        cpu, began_s = Cpu(server.pid), time.perf_counter()
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(send, server.url, write, num_rollouts // AT_ONCE, NUM_WRITERS)
            _take_all(run, num_rollouts)
            writing.result()
        wall_s = time.perf_counter() - began_s
        rates = [num_rollouts / seconds for seconds in (wall_s, cpu.used_s)]
        rows.append((f"{kilobytes} KB", *rates, num_bytes / wall_s * 86_400 / 1e9))
        assert run.view()["groups"]["acked"] == num_rollouts // GROUP_SIZE
    show("One server", ("rollout", "rollouts/s", "rollouts per CPU second", "GB/day"), rows)


def _written(path: str, num_bytes: int, number: int) -> bytes:
    """A request with as many samples as a writer sends at once."""
    numbers = range(number * AT_ONCE, (number + 1) * AT_ONCE)
    body = b"\n".join(sample_body(each, num_bytes, GROUP_SIZE) for each in numbers)
    return post(f"{path}/samples", body, b"application/x-ndjson")


def _take_all(run: NativeRun, num_rollouts: int) -> None:
    """Read whole batches, as bytes, and acknowledge each."""
    wanted = {"num_groups": AT_ONCE, "wait_s": 20}
    for _ in range(num_rollouts // GROUP_SIZE // AT_ONCE):
        reply = run.client.post(f"{run.path}/batches", json=wanted)
        found = re.search(rb'"batch_id": ?"([^"]+)"', reply.content)
        assert found, reply.text[:1_000]
        run.ack({"batch_id": found[1].decode()})
