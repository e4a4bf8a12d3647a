"""Reading 1 024 samples, against a loopback transfer of the same bytes."""

from statistics import median

import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import loopback_seconds, request_seconds, show
from tests.conftest import MakeServer

pytestmark = pytest.mark.bench

ROUNDS = 5
NUM_SAMPLES = 1_024
TARGETS = {4: 12.0, 32: 3.0, 128: 2.0}


def test_a_read_costs_a_small_multiple_of_sending_its_bytes(make_server: MakeServer) -> None:
    server = make_server(log_level="warning")
    rows = []
    for kilobytes, target in TARGETS.items():
        run = server.start_slime(f"{kilobytes}", group_size=8)
        requests = [
            post(f"{run.prefix}/buffer/write", sample_body(i, kilobytes * 1_000, prefix=f"{kilobytes}-"))
            for i in range(ROUNDS * NUM_SAMPLES)
        ]
        send(server.url, requests.__getitem__, len(requests), 32)
        read = post(f"{run.path}/batches", b'{"num_groups": %d}' % (NUM_SAMPLES // 8))
        ours, floors = [], []
        for _ in range(ROUNDS):
            took_s, size = request_seconds(server.url, read)
            assert size > NUM_SAMPLES * kilobytes * 900
            ours.append(took_s)
            floors.append(loopback_seconds(size))
        ratio = median(ours) / median(floors)
        rows.append((f"{kilobytes} KB", median(floors) * 1e3, median(ours) * 1e3, ratio, target))
    show(f"A read of {NUM_SAMPLES} samples", ("sample", "loopback, ms", "forebay, ms", "ratio", "target"), rows)
    missed = [row for row in rows if row[3] > row[4]]
    assert not missed
