"""What a report costs: against decoding its lines, and the memory of many steps against that of few."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.tracing.records import Record
from tests.benchmarks.machines import show
from tests.benchmarks.traces import plant_steps

pytestmark = pytest.mark.bench

MAX_TIMES_DECODING = 30
MAX_TIMES_MEMORY = 2
ROUNDS = 3
ROLLOUTS_PER_STEP = 1_000
MEMORY_ROLLOUTS = 160

# In a process of its own: what a report needs at its most, beside what the interpreter has when all is imported.
PEAK = """
import sys, tracemalloc
from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis import load_trace, make_report
tracemalloc.start()
report = analyse(load(sys.argv[1]))
assert report.num_steps == int(sys.argv[2]), report.num_steps
print(tracemalloc.get_traced_memory()[1])
"""


def test_a_report_costs_thirty_times_the_decoding_of_its_lines_at_most(tmp_path: Path) -> None:
    num_spans = plant_steps(tmp_path, 10, ROLLOUTS_PER_STEP)
    decode = msgspec.json.Decoder(Record).decode
    lines = [line for path in tmp_path.iterdir() for line in path.read_bytes().splitlines()]
    decoding, reporting = [], []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for line in lines:
            decode(line)
        decoding.append(time.process_time() - begun)
        begun = time.process_time()
        report = analyse(load(tmp_path))
        reporting.append(time.process_time() - begun)
        assert report.num_requests == 10 * ROLLOUTS_PER_STEP
    ratio = min(reporting) / min(decoding)
    show(
        f"A report of {num_spans:,} spans, seconds of CPU",
        ("", "decoding", "report", "ratio", "target"),
        [("ten steps", min(decoding), min(reporting), ratio, MAX_TIMES_DECODING)],
    )
    assert ratio <= MAX_TIMES_DECODING


def test_a_hundred_steps_take_twice_the_memory_of_ten_at_most(tmp_path: Path) -> None:
    peaks = []
    for num_steps in (10, 100):
        folder = tmp_path / str(num_steps)
        plant_steps(folder, num_steps, MEMORY_ROLLOUTS)
        done = subprocess.run(
            [sys.executable, "-P", "-c", PEAK, str(folder), str(num_steps)], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout))
    ratio = peaks[1] / peaks[0]
    megabytes = [peak / (1 << 20) for peak in peaks]
    show(
        f"Memory of a report, MiB, {MEMORY_ROLLOUTS} rollouts a step",
        ("", "10 steps", "100 steps", "ratio", "target"),
        [("peak", *megabytes, ratio, MAX_TIMES_MEMORY)],
    )
    assert ratio <= MAX_TIMES_MEMORY
