"""Minutes of writing, reading and acknowledging: the server's memory and its descriptors stay what they were."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import MakeServer
from tests.liveness import Liveness
from tests.steady_load import GROUP_SIZE, SteadyLoad, num_descriptors, resident_bytes

MINUTES = float(os.environ.get("MINUTES", "4"))
"""By hand: MINUTES=20."""
NUM_WRITERS = 4
NUM_WARM = 100_000
"""After so many samples everything that has a bound has reached it, however slow the machine is."""


@pytest.mark.soak
def test_memory_and_descriptors_are_flat_after_the_first_quarter(make_server: MakeServer) -> None:
    server = make_server(remembered_samples=8_192, log_level="warning")
    run = server.start_run(group_size=GROUP_SIZE)
    loads = [SteadyLoad(run, f"writer-{number}/") for number in range(NUM_WRITERS)]
    seen: list[tuple[int, int, int]] = []
    began_s = time.monotonic()

    def carry_on(load: SteadyLoad, until_s: float) -> None:
        while time.monotonic() < until_s or load.num_samples < NUM_WARM / NUM_WRITERS:
            load.go_on_to(load.num_samples + 1)

    with Liveness(server), ThreadPoolExecutor(NUM_WRITERS) as threads:
        for quarter in range(1, 5):
            until_s = began_s + quarter * MINUTES * 15
            list(threads.map(lambda load, until_s=until_s: carry_on(load, until_s), loads))
            num_samples = sum(load.num_samples for load in loads)
            seen.append((num_samples, resident_bytes(server), num_descriptors(server)))
            print(
                f"{quarter * MINUTES / 4:g} min: {seen[-1][0]} samples, {seen[-1][1] / 1e6:.1f} MB, {seen[-1][2]} open"
            )
    (_, first_bytes, first_open), *later = seen
    for _, num_bytes, num_open in later:
        assert num_bytes <= 1.05 * first_bytes
        assert abs(num_open - first_open) <= 5
