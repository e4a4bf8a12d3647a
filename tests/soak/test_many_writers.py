"""Several connections that write at once, long past what memory holds: nothing is refused, and the server answers."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from forebay.client import SampleWriter
from forebay.core.binary_sample import SAMPLES_TYPE, join_samples, pack
from tests.benchmarks.load import post, send
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun
from tests.liveness import Liveness

GROUP_SIZE = 8
IN_BODY = 256

Write = Callable[[NativeRun, range, int], None]
"""Writes the samples with these numbers to a run over that many connections."""


def sample(number: int) -> Json:
    group, slot = divmod(number, GROUP_SIZE)
    place = {"instance_id": f"row-{group}", "epoch": 0, "slot": slot}
    return {"uid": f"uid-{number}", "reward": float(slot % 2), "messages": [], **place}


def write_json(run: NativeRun, numbers: range, num_writers: int) -> None:
    def request(index: int) -> bytes:
        body = json.dumps([sample(each) for each in numbers[index * IN_BODY :][:IN_BODY]])
        return post(f"{run.path}/samples", body.encode())

    send(run.server.url, request, len(numbers) // IN_BODY, num_writers)


def write_binary(run: NativeRun, numbers: range, num_writers: int) -> None:
    def request(index: int) -> bytes:
        rows = numbers[index * IN_BODY :][:IN_BODY]
        body = join_samples(pack(json.dumps(sample(each)).encode(), bytes(64)) for each in rows)
        return post(f"{run.path}/samples", body).replace(b"application/json", SAMPLES_TYPE.encode(), 1)

    send(run.server.url, request, len(numbers) // IN_BODY, num_writers)


def write_slime(run: NativeRun, numbers: range, num_writers: int) -> None:
    """As slime's generators do: one by one, without an epoch."""

    def request(index: int) -> bytes:
        body = {name: value for name, value in sample(numbers[index]).items() if name not in ("epoch", "slot")}
        return post("/s/many/buffer/write", json.dumps(body).encode())

    send(run.server.url, request, len(numbers), num_writers)


def write_with_clients(run: NativeRun, numbers: range, num_writers: int) -> None:
    def write(own: range) -> None:
        with SampleWriter(run.server.url, run.run_id) as writer:
            for number in own:
                writer.write(sample(number))

    with ThreadPoolExecutor(num_writers) as threads:
        list(threads.map(write, [numbers[first::num_writers] for first in range(num_writers)]))


ROUTES: dict[str, tuple[Write, int]] = {
    "json": (write_json, 200_000),
    "binary": (write_binary, 100_000),
    "client": (write_with_clients, 50_000),
    "slime": (write_slime, 30_000),
}
"""How samples get to each, and how many for each number of writers. By hand: ``make test-soak SAMPLES=500000``."""


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
@pytest.mark.parametrize("route", ROUTES)
def test_writers_beside_each_other_never_stop_the_server(make_server: MakeServer, route: str, num_writers: int) -> None:
    server = make_server(remembered_samples=500, log_level="warning")
    start = (
        server.start_slime("many", group_size=GROUP_SIZE)
        if route == "slime"
        else server.start_run(group_size=GROUP_SIZE)
    )
    run = NativeRun(server, start.run_id)
    write, default = ROUTES[route]
    half = int(os.environ.get("SAMPLES", default)) // (2 * IN_BODY) * IN_BODY
    began_s = time.monotonic()
    with Liveness(server) as liveness:
        for first in (0, half):
            with trainer(run):
                write(run, range(first, first + half), num_writers)
            server.stop()
            server.restart()
    wall_s = time.monotonic() - began_s
    print(f"{2 * half / wall_s:.0f} samples/s, /healthz at most {liveness.slowest_s:.2f} s")
    assert run.view()["groups"]["acked"] == 2 * half // GROUP_SIZE
