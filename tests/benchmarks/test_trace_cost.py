"""What tracing costs: a span against one of the OpenTelemetry SDK, and the memory of a process that traces.

Ratios: both sides are measured in turn, in CPU time of one process, and the best of some rounds counts.
"""

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from forebay.telemetry import span
from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing
from tests.benchmarks.machines import show

pytestmark = pytest.mark.bench

NUM_SPANS = 4_000
ROUNDS = 12
TARGET = 0.2
ATTRIBUTES = {"engine": "http://10.0.0.7:30000", "sampled": 812, "cached": 4_096, "finish_reason": "tool_calls"}


class Nowhere(SpanExporter):
    """Takes all, and keeps nothing."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def cpu_us(work: Callable[[], None]) -> float:
    """Of a span, in all threads of this process."""
    gc.collect()
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) / NUM_SPANS * 1e6


def ours() -> None:
    """Record, encode, write: a rollout has twenty."""
    with tempfile.TemporaryDirectory() as folder:
        tracer = start_tracing(TraceSettings(folder=folder, run_id="run-0123456789ab"), "run")
        for number in range(NUM_SPANS // 20):
            with tracer.attempt(f"uid-{number}", "group", 0).activate():
                for _ in range(20):
                    with span("engine", **ATTRIBUTES):
                        pass
        tracer.close()


def theirs() -> None:
    """The same with the SDK: kept, in batches, exported to nowhere."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=2 * NUM_SPANS))
    tracer = provider.get_tracer("forebay")
    for _ in range(NUM_SPANS):
        with tracer.start_as_current_span("engine", attributes=ATTRIBUTES):
            pass
    provider.shutdown()


def test_a_span_costs_a_fifth_of_one_of_the_opentelemetry_sdk() -> None:
    ours(), theirs()
    rounds = [(cpu_us(ours), cpu_us(theirs)) for _ in range(ROUNDS)]
    own, sdk = (min(times) for times in zip(*rounds, strict=True))
    show("A span", ["", "CPU"], [["recorded, encoded, written", f"{own:.2f} µs"], ["of the SDK", f"{sdk:.2f} µs"]])
    assert own <= TARGET * sdk


ROLLOUTS = """
import os, sys
from pathlib import Path
from forebay.telemetry import span
from forebay.telemetry.tracing.tracer import NO_TRACE, TraceSettings, start_tracing

def resident_kib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10

tracer = start_tracing(TraceSettings(folder=sys.argv[1], run_id="run-0123456789ab"), "run") if sys.argv[1] else NO_TRACE
for number in range(50_001):
    if number % 500 == 0 and sys.argv[1]:
        tracer.flush()  # these come faster than any, and what waits is not what is looked at
    if number in (25_000, 50_000):
        print(resident_kib(), flush=True)
    attempt = tracer.attempt(f"uid-{number}", f"group-{number // 8}", 0)
    with attempt.activate():
        for turn in range(4):
            with attempt.turn(turn, has_tools=True):
                with span("engine", engine="http://10.0.0.7:30000", sampled=812, cached=4_096): pass
            with span("tool", name="search"): pass
        with span("reward"): pass
    attempt.summary(instance=number, ending="finished")
"""


def resident_kib(folder: str) -> list[int]:
    """Of a process, after 25,000 and after 50,000 rollouts."""
    command = [sys.executable, "-P", "-c", ROLLOUTS, folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return [int(line) for line in done.stdout.split()]


def test_a_process_that_traces_stays_flat_and_takes_32_mib_more_at_most(tmp_path: Path) -> None:
    without = resident_kib("")
    first, second = resident_kib(str(tmp_path))
    rows = [["25,000", f"{first - without[0]:,} KiB"], ["50,000", f"{second - without[1]:,} KiB"]]
    show("Memory of tracing", ["rollouts", "more than without"], rows)
    assert second - without[1] <= 32 << 10
    assert second <= 1.05 * first
