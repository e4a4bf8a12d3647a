"""Minutes of writing, reading and acknowledging: the server's memory and its descriptors stay what they were."""

import os
import time

import pytest

from tests.conftest import MakeServer
from tests.steady_load import GROUP_SIZE, SteadyLoad, num_descriptors, resident_bytes

MINUTES = float(os.environ.get("MINUTES", "4"))
"""By hand: MINUTES=20."""
NUM_WARM = 100_000
"""After so many samples everything that has a bound has reached it, however slow the machine is."""


@pytest.mark.soak
def test_memory_and_descriptors_are_flat_after_the_first_quarter(make_server: MakeServer) -> None:
    server = make_server(remembered_samples=8_192, log_level="warning")
    load = SteadyLoad(server.start_run(group_size=GROUP_SIZE))
    seen: list[tuple[int, int, int]] = []
    began_s = time.monotonic()
    for quarter in range(1, 5):
        while time.monotonic() - began_s < quarter * MINUTES * 15 or load.num_samples < NUM_WARM:
            load.go_on_to(load.num_samples + 1)
        seen.append((load.num_samples, resident_bytes(server), num_descriptors(server)))
        print(f"{quarter * MINUTES / 4:g} min: {seen[-1][0]} samples, {seen[-1][1] / 1e6:.1f} MB, {seen[-1][2]} open")
    (_, first_bytes, first_open), *later = seen
    for _, num_bytes, num_open in later:
        assert num_bytes <= 1.05 * first_bytes
        assert abs(num_open - first_open) <= 5
