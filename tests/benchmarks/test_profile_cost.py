"""What a report costs: against decoding its lines, and the memory of many steps against that of few."""

import random
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
from tests.telemetry.planted_log import MOMENT_S, clean_step, write_step

pytestmark = pytest.mark.bench

MAX_TIMES_DECODING = 30
MAX_TIMES_MEMORY = 2
ROUNDS = 3
ROLLOUTS_PER_STEP = 1_000
MEMORY_ROLLOUTS = 160
MAX_MB_OF_LOG = 60
LOG_STEPS, LOG_WORKERS, LOG_REQUESTS = 10, 8, 430
"""verl's profile log of about 98 MB."""

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

# The same in memory of the process, which includes what the allocator keeps. ``ru_maxrss`` starts at that of pytest.
PEAK_RSS = """
import sys
from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis import load_trace, make_report
def peak():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
idle = peak()
report = analyse(load(sys.argv[1]))
assert report.num_steps == int(sys.argv[2]), report.num_steps
print((peak() - idle) * 1024)
"""


def _peak(code: str, folder: Path, num_steps: int) -> int:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder), str(num_steps)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


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
        peaks.append(_peak(PEAK, folder, num_steps))
    ratio = peaks[1] / peaks[0]
    megabytes = [peak / (1 << 20) for peak in peaks]
    show(
        f"Memory of a report, MiB, {MEMORY_ROLLOUTS} rollouts a step",
        ("", "10 steps", "100 steps", "ratio", "target"),
        [("peak", *megabytes, ratio, MAX_TIMES_MEMORY)],
    )
    assert ratio <= MAX_TIMES_MEMORY


def test_a_log_of_98_mb_takes_60_mb_at_most(tmp_path: Path) -> None:
    rng, begin_s = random.Random(1), MOMENT_S
    for number in range(LOG_STEPS):
        begin_s = write_step(tmp_path, number, clean_step(rng, number, LOG_WORKERS, LOG_REQUESTS), begin_s) + 5.0
    sizes = [sum(file.stat().st_size for file in step.iterdir()) / 1e6 for step in tmp_path.iterdir()]
    peak = _peak(PEAK_RSS, tmp_path, LOG_STEPS) / 1e6
    show(
        "Memory of a report on verl's profile log, MB",
        ("", "log", "largest step", "peak", "target"),
        [("ten steps", sum(sizes), max(sizes), peak, MAX_MB_OF_LOG)],
    )
    assert 90 < sum(sizes) < 110
    assert 0 < peak <= MAX_MB_OF_LOG
