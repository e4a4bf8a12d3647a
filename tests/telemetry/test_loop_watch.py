"""An event loop that stands still is noted: while it lasts, with the stack, and when it has ended."""

import asyncio
import time
from pathlib import Path

import pytest

from forebay.telemetry.tracing.loop_watch import LoopWatch
from tests.telemetry.trace_kit import kinds, make_tracer, of_kind


def compute(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_standstill_of_a_second_is_noted_with_the_stack(tmp_path: Path) -> None:
    tracer, other = make_tracer(tmp_path / "one"), make_tracer(tmp_path / "other")
    watch = LoopWatch()
    watch.start(tracer)
    watch.add(other)
    await asyncio.sleep(0.15)
    began = tracer.now()
    compute(1.6)
    ended = tracer.now()
    await asyncio.sleep(0.15)
    watch.stop()
    tracer.close()
    other.close()
    during, after = of_kind(tmp_path / "one", "loop")
    assert not during["has_ended"]
    assert after.get("has_ended", True)
    assert during["stack"] == after["stack"]
    assert any(line.endswith(" compute") and "test_loop_watch.py:" in line for line in during["stack"])
    assert during["t"] == after["t"] == pytest.approx(began, abs=150_000_000)
    assert after["t"] + after["d"] == pytest.approx(ended, abs=250_000_000)
    assert 0.9e9 < during["d"] < 1.6e9
    assert kinds(tmp_path / "other")["loop"] == 2


async def test_shorter_ones_are_not(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    watch = LoopWatch(stall_s=5.0)
    watch.start(tracer)
    await asyncio.sleep(0.15)
    compute(0.5)
    await asyncio.sleep(0.15)
    watch.stop()
    tracer.close()
    assert not list(tmp_path.iterdir())


async def test_one_is_noted_to_have_ended_although_nobody_could_look_meanwhile(tmp_path: Path) -> None:
    """As when a library computes without ever letting go of the interpreter."""
    tracer = make_tracer(tmp_path)
    watch = LoopWatch(stall_s=0.2)
    watch.start(tracer)
    watch.remove(tracer)
    watch.add(tracer)
    await asyncio.sleep(0.15)
    sum(range(30_000_000))  # in one call of C
    await asyncio.sleep(0.15)
    watch.stop()
    tracer.close()
    notes = [line for line in of_kind(tmp_path, "loop") if line.get("has_ended", True)]
    assert len(notes) == 1
    assert notes[0]["d"] > 0.2e9
