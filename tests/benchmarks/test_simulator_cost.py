"""What a simulation takes: of CPU and memory, for ten thousand rollouts and for a million."""

import subprocess
import sys
import time

import pytest

from tests.benchmarks.machines import show

pytestmark = pytest.mark.bench

SMALL, LARGE = (100, 10_000), (10_000, 1_000_000)
MAX_MINUTES, MAX_GIB, MAX_RATIO = 15, 4, 3

SIMULATE = """
import resource, sys, time
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import POPULATIONS
from forebay.workers.simulator.scenario import Scenario, simulate

num_engines, num_rollouts = map(int, sys.argv[1:])
prompts = POPULATIONS["probe"].prompts(num_rollouts // 8, seed=0)
scenario = Scenario(prompts, 8, 32 * num_engines, [EngineCost()] * num_engines, max_tokens=2048)
begun = time.process_time()
run = simulate(scenario)
assert len(run.rollouts) == num_rollouts
print(time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


def simulated(num_engines: int, num_rollouts: int) -> tuple[float, float, float]:
    """Seconds on the clock and of CPU, and bytes, of one in a process of its own."""
    begun = time.monotonic()
    command = [sys.executable, "-c", SIMULATE, str(num_engines), str(num_rollouts)]
    cpu_s, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return time.monotonic() - begun, float(cpu_s), float(size)


def test_a_million_rollouts_on_ten_thousand_engines() -> None:
    small_s, small_cpu_s, small_size = simulated(*SMALL)
    large_s, large_cpu_s, large_size = simulated(*LARGE)
    small_us, large_us = 1e6 * small_cpu_s / SMALL[1], 1e6 * large_cpu_s / LARGE[1]
    rows = [
        ("minutes", small_s / 60, large_s / 60, MAX_MINUTES),
        ("CPU per rollout, µs", small_us, large_us, f"{MAX_RATIO} times"),
        ("memory, GiB", small_size / (1 << 30), large_size / (1 << 30), MAX_GIB),
    ]
    show("Simulated rollouts", ("", *(f"{num:,} on {engines:,}" for engines, num in (SMALL, LARGE)), "target"), rows)
    assert large_s <= MAX_MINUTES * 60
    assert large_us <= MAX_RATIO * small_us
    assert large_size <= MAX_GIB << 30
