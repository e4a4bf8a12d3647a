"""What a call costs at a recorded engine, against the scripted one; and what a recorder adds to an engine's time."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.engines.capture.request_fields import WHOLE_NAMES, asking
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.replay import RecordedEngine
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import Cpu, show
from tests.benchmarks.test_gateway_cost import BODY, CALLS, CONCURRENCY, NUM_TOKENS, seconds, streamed, whole
from tests.kit import first_line

pytestmark = pytest.mark.bench

NUM_CALLS = 1_600
ROUNDS = 5
REPLAYING, RECORDING = 1.5, 0.15
FILE_CALLS = (5_000, 50_000)
OPENING = 1.5
"""How much longer opening may take for each call of the larger file."""
ENGINE = f"""
import asyncio, sys
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.replay import RecordedEngine

async def main():
    async with ScriptedEngine(lambda call: Reply(text="x" * {NUM_TOKENS - 1})) as engine:
        print(f'{{{{"url": "{{engine.url}}"}}}}', flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
CALL = post("/v1/chat/completions", json.dumps(asking(BODY, WHOLE_NAMES, is_stream=False)).encode())


@contextmanager
def started(*arguments: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a process that writes its address as a line of JSON."""
    process = subprocess.Popen([sys.executable, "-P", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(first_line(process.stdout, 60))["url"], process.pid
    finally:
        process.terminate()
        process.communicate()


def engine_command(*arguments: object) -> list[str]:
    return ["-m", "forebay.server.cli", "engine", *map(str, arguments), "--port", "0", "--json"]


def test_a_recorded_answer_costs_about_what_a_scripted_one_does(tmp_path: Path) -> None:
    file = tmp_path / "calls.fbr"
    with started("-c", ENGINE) as (scripted_url, scripted_pid):
        with started(*engine_command("record", file, "--upstream", scripted_url)) as (url, pid):
            recorder = Cpu(pid)
            recording = send(url, lambda _: CALL, NUM_CALLS, CONCURRENCY)
            recording_cpu_s = recorder.used_s
        with started(*engine_command("replay", file, "--again")) as (url, pid):
            used = {}
            for name, target, its_pid in (("scripted", scripted_url, scripted_pid), ("recorded", url, pid)):
                send(target, lambda _: CALL, NUM_CALLS, CONCURRENCY)
                used[name] = Cpu(its_pid)
            targets = (scripted_url, url)
            pairs = [[send(at, lambda _: CALL, NUM_CALLS, CONCURRENCY).wall_s for at in targets] for _ in range(ROUNDS)]
            cpu_s = {name: cpu.used_s / ROUNDS for name, cpu in used.items()}
    best_s = [min(times) for times in zip(*pairs, strict=True)]
    took = zip(cpu_s.items(), best_s, strict=True)
    rows = [(name, wall / NUM_CALLS * 1e3, cpu / NUM_CALLS * 1e3) for (name, cpu), wall in took]
    rows.append(("recorder, and scripted", recording.wall_s / NUM_CALLS * 1e3, recording_cpu_s / NUM_CALLS * 1e3))
    show(f"{CONCURRENCY} calls at once, {NUM_TOKENS} tokens each", ("engine", "ms a call", "its CPU, ms"), rows)
    assert best_s[1] <= REPLAYING * best_s[0]


def test_a_recorder_adds_little_to_the_time_of_64_tokens(tmp_path: Path) -> None:
    reply = Reply(text="x" * (NUM_TOKENS - 1), delay_s=2.0)
    rows, shares = [], []
    with ScriptedEngine(lambda _: reply).in_thread() as engine:
        command = engine_command("record", tmp_path / "calls.fbr", "--upstream", engine.url)
        with started(*command) as (url, pid):
            for ask in (whole, streamed):
                recorder = Cpu(pid)
                targets = [[(f"{each}/v1", {})] * CONCURRENCY for each in (engine.url, url)]
                pairs = [[asyncio.run(seconds(ask, each)) for each in targets] for _ in range(ROUNDS)]
                own_s = recorder.used_s / (ROUNDS * CONCURRENCY * CALLS)
                engine_s, recorded_s = (min(times) for times in zip(*pairs, strict=True))
                shares.append(recorded_s / engine_s - 1)
                rows.append((ask.__name__, engine_s * 1e3, recorded_s * 1e3, shares[-1] * 100, own_s * 1e3))
    show("an engine of 2 s", ("call", "engine, ms", "recorded, ms", "more, %", "recorder's CPU, ms"), rows)
    assert max(shares) <= RECORDING


def test_opening_a_file_takes_time_in_proportion_to_its_calls(tmp_path: Path) -> None:
    took_s = []
    for num_calls in FILE_CALLS:
        file = tmp_path / f"{num_calls}.fbr"
        with ScriptedEngine(lambda _: "four").in_thread() as engine:
            command = engine_command("record", file, "--upstream", engine.url)
            with started(*command) as (url, _):
                send(url, numbered_call, num_calls, CONCURRENCY)
        took_s.append(min(asyncio.run(opening_s(file)) for _ in range(3)))
    rows = [(num, seconds, seconds / num * 1e6) for num, seconds in zip(FILE_CALLS, took_s, strict=True)]
    show("opening a recorded engine", ("calls", "s", "µs a call"), rows)
    assert took_s[1] / FILE_CALLS[1] <= OPENING * took_s[0] / FILE_CALLS[0]


def numbered_call(number: int) -> bytes:
    body = {**BODY, "messages": [{"role": "user", "content": f"question {number}"}]}
    return post("/v1/chat/completions", json.dumps(asking(body, WHOLE_NAMES, is_stream=False)).encode())


async def opening_s(file: Path) -> float:
    began_s = time.process_time()
    async with RecordedEngine(file):
        return time.process_time() - began_s
