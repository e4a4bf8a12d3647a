"""An event loop that stands still is noted: while it lasts, with the stack, and when it has ended."""

import asyncio
import ctypes
import threading
import time
from pathlib import Path

from forebay.telemetry.tracing.stall_watch import StallWatch
from tests.telemetry.trace_kit import kinds, make_tracer, of_kind

BEAT_NS = 100_000_000


def compute(noted: threading.Event) -> None:
    assert noted.wait(30)


async def test_a_standstill_of_a_second_is_noted_with_the_stack(tmp_path: Path) -> None:
    tracer, other = make_tracer(tmp_path / "one"), make_tracer(tmp_path / "other")
    watch, noted = StallWatch(stall_s=5.0), threading.Event()
    before = tracer.now()
    watch.add(tracer.note_stall)
    watch.add(lambda _: noted.set())
    watch.add(other.note_stall)
    watch.start()
    await asyncio.sleep(0.15)
    began = tracer.now()
    compute(noted)
    ended = tracer.now()
    await asyncio.sleep(0.15)
    after_all = tracer.now()
    watch.stop()
    tracer.close()
    other.close()
    during, after = of_kind(tmp_path / "one", "loop")
    assert not during["has_ended"]
    assert after.get("has_ended", True)
    assert during["stack"] == after["stack"]
    assert any(line.endswith(" compute") and "test_stall_watch.py:" in line for line in during["stack"])
    assert before <= during["t"] == after["t"] <= began + BEAT_NS
    assert ended <= after["t"] + after["d"] <= after_all
    assert 5e9 - BEAT_NS <= during["d"] <= after["d"]
    assert kinds(tmp_path / "other")["loop"] == 2


async def test_shorter_ones_are_not(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    watch = StallWatch(stall_s=5.0)
    watch.add(tracer.note_stall)
    watch.start()
    await asyncio.sleep(0.15)
    time.sleep(0.5)  # noqa: ASYNC251 - that is what is tried
    await asyncio.sleep(0.15)
    watch.stop()
    tracer.close()
    assert not list(tmp_path.iterdir())


async def test_one_is_noted_to_have_ended_although_nobody_could_look_meanwhile(tmp_path: Path) -> None:
    """As when a library computes without ever letting go of the interpreter."""
    tracer = make_tracer(tmp_path)
    watch = StallWatch(stall_s=0.2)
    watch.add(tracer.note_stall)
    watch.remove(tracer.note_stall)
    watch.add(tracer.note_stall)
    watch.start()
    await asyncio.sleep(0.15)
    ctypes.PyDLL(None).usleep(600_000)  # with the interpreter's lock
    await asyncio.sleep(0.15)
    watch.stop()
    tracer.close()
    notes = [line for line in of_kind(tmp_path, "loop") if line.get("has_ended", True)]
    assert max(note["d"] for note in notes) > 0.5e9
