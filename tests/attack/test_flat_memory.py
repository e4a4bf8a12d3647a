"""Memory does not grow with the samples that are done with."""

import os

from tests.conftest import MakeServer
from tests.steady_load import GROUP_SIZE, SteadyLoad, resident_bytes

THOUSANDS = int(os.environ.get("ROUNDS", "200"))
"""So many samples go through. By hand: ROUNDS=1000 for a million."""
REMEMBERED = 4_096
MOST_BYTES_PER_SAMPLE = 120.0
"""The index's cache of 32 MB is still filling meanwhile."""


def test_samples_that_were_acknowledged_cost_no_memory(make_server: MakeServer) -> None:
    server = make_server(remembered_samples=REMEMBERED, log_level="warning")
    load = SteadyLoad(server.start_run(group_size=GROUP_SIZE))
    first, last = 100_000, THOUSANDS * 1_000
    load.go_on_to(first)
    before = resident_bytes(server)
    load.go_on_to(last)
    after = resident_bytes(server)
    grown = (after - before) / (last - first)
    print(f"{before >> 20} MiB with {first} samples, {after >> 20} with {last}: {grown:.1f} bytes for each")
    assert grown < MOST_BYTES_PER_SAMPLE
    # None of them is taken twice all the same: the first group has been gone for long.
    again = server.client.post(f"{load.run.path}/samples", json=[load.sample(number) for number in range(GROUP_SIZE)])
    assert [result["duplicate"] for result in again.json()["results"]] == [True] * GROUP_SIZE
    assert len(load.run.groups()) == 1_000
    assert load.run.view()["groups"]["acked"] == load.num_samples // GROUP_SIZE
