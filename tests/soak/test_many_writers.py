"""Several connections that write at once, long past what memory holds: nothing is refused, and the server answers."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.benchmarks.load import post, send
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun
from tests.liveness import Liveness

DEFAULT_SAMPLES = {"native": "200000", "slime": "30000"}
SAMPLES = {route: int(os.environ.get("SAMPLES", default)) for route, default in DEFAULT_SAMPLES.items()}
"""For each number of writers. By hand: SAMPLES=500000."""
GROUP_SIZE = 8


def _samples(first: int, number: int) -> Iterator[Json]:
    for index in range(first, first + number):
        group, slot = divmod(index, GROUP_SIZE)
        place = {"instance_id": f"row-{group}", "epoch": 0, "slot": slot}
        yield {"uid": f"uid-{index}", "reward": float(slot % 2), "messages": [], **place}


@contextmanager
def trainer(run: NativeRun) -> Iterator[None]:
    """Reads and acknowledges what there is, so that samples leave memory; at the end, all that is left."""
    is_over = threading.Event()

    def take() -> None:
        is_last = False
        while not is_last:
            is_over_before = is_over.is_set()
            batch = run.read(num_groups=1 if is_over_before else 64, wait_s=0.5)
            is_last = is_over_before and batch["batch_id"] is None
            if batch["batch_id"] is not None:
                run.ack(batch)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.soak
@pytest.mark.parametrize("num_writers", [2, 4, 8])
@pytest.mark.parametrize(("route", "num_in_body"), [("native", 256), ("slime", 1)])
def test_writers_beside_each_other_never_stop_the_server(
    make_server: MakeServer, route: str, num_in_body: int, num_writers: int
) -> None:
    server = make_server(remembered_samples=500, log_level="warning")
    if route == "slime":
        run_id, path = server.start_slime("many", group_size=GROUP_SIZE).run_id, "/s/many/buffer/write"
    else:
        run_id = server.start_run(group_size=GROUP_SIZE).run_id
        path = f"/v1/runs/{run_id}/samples"
    run = NativeRun(server, run_id)

    def request(number: int) -> bytes:
        samples = list(_samples(number * num_in_body, num_in_body))
        return post(path, json.dumps(samples if num_in_body > 1 else samples[0]).encode())

    num_requests = -(-SAMPLES[route] // num_in_body)
    with Liveness(server) as liveness, trainer(run):
        sent = send(server.url, request, num_requests, num_writers)
    print(f"{num_requests * num_in_body / sent.wall_s:.0f} samples/s, /healthz at most {liveness.slowest_s:.2f} s")
    assert run.view()["groups"]["acked"] == num_requests * num_in_body // GROUP_SIZE
