"""Reading 1 024 samples, against a loopback transfer of the same bytes."""

from statistics import median

import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import loopback_seconds, proof_seconds, request_seconds, show
from tests.conftest import MakeServer

pytestmark = pytest.mark.bench

ROUNDS = 5
NUM_SAMPLES = 1_024
TARGETS = {4: 12.0, 32: 3.0, 128: 2.0}
"""Times a loopback transfer; one pass over the bytes comes on top, since each body is proved before it is sent."""


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
        ours, floors, passes = [], [], []
        for _ in range(ROUNDS):
            took_s, size = request_seconds(server.url, read)
            assert size > NUM_SAMPLES * kilobytes * 900
            ours.append(took_s)
            floors.append(loopback_seconds(size))
            passes.append(proof_seconds(size))
        floor_s, pass_s, ours_s = median(floors), median(passes), median(ours)
        aim = target + pass_s / floor_s
        rows.append((f"{kilobytes} KB", floor_s * 1e3, pass_s * 1e3, ours_s * 1e3, ours_s / floor_s, aim))
    columns = ("sample", "loopback, ms", "one pass, ms", "forebay, ms", "ratio", "target")
    show(f"A read of {NUM_SAMPLES} samples", columns, rows)
    missed = [row for row in rows if row[-2] > row[-1]]
    assert not missed
