"""What the gateway adds to a call: against the time of the engine itself, for 64 tokens at concurrency 32.

``FOREBAY_ENGINE_URL`` names a real engine to measure with. On a machine that both share, the gateway's CPU is taken
from the engine: the figure is an upper bound.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedEngine
from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.gateway.test_gateway_process import TELLS, admitted, gateway_pids, opened, told_to
from tests.kit import write_generator

pytestmark = pytest.mark.bench

CONCURRENCY = 32
CALLS = 2
"""Of each client in a round."""
NUM_TOKENS = 64
ROUNDS = 5
TARGET = 0.15
BODY = {
    "model": "any",
    "messages": [{"role": "user", "content": "What is 2+2? Think about it."}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
}
PACED_STREAMS = 32
PACED_TOKENS = 100
TOKENS_PER_S = 10.0
"""Slow enough that tokens arrive one by one on a busy machine too."""
PACED_TARGET = 1.4

Target = tuple[str, dict[str, str]]
"""The address to call, and the headers of the call."""
Ask = Callable[[httpx.AsyncClient, str, dict[str, str]], Awaitable[float]]


async def whole(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> float:
    """Seconds of a whole call."""
    began_s = time.perf_counter()
    reply = await http.post(f"{url}/chat/completions", json=BODY, headers=headers)
    assert reply.status_code == 200, reply.text
    return time.perf_counter() - began_s


async def streamed(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> float:
    """Seconds of a streamed call, to its last chunk."""
    began_s = time.perf_counter()
    body = {**BODY, "stream": True}
    async with http.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as reply:
        assert reply.status_code == 200
        async for _ in reply.aiter_bytes():
            pass
    return time.perf_counter() - began_s


async def seconds(ask: Ask, targets: list[Target]) -> float:
    """The mean time of a call when all are made at once, each after its last one's end, a few times."""
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:

        async def worker(url: str, headers: dict[str, str]) -> list[float]:
            return [await ask(http, url, headers) for _ in range(CALLS)]

        times = await asyncio.gather(*(worker(*target) for target in targets))
    return sum(map(sum, times)) / sum(map(len, times))


def cpu_s(process: psutil.Process) -> float:
    """What it has used so far: other work on the machine does not change it much."""
    used = process.cpu_times()
    return float(used.user + used.system)


def gateway_over(
    make_server: MakeServer, tmp_path: Path, engine_url: str, num_rollouts: int
) -> tuple[psutil.Process, list[Target]]:
    """The process of a gateway in front of an engine, and a target for each of its open rollouts."""
    folder = tmp_path / "tasks"
    write_generator(folder, TELLS, "tells_generator.py")
    server = make_server(generators=folder, start_wait_s=60, log_level="warning")
    gateway = admitted(told_to(server.start_run("tells", remote_engine_url=engine_url)))
    rollouts = [opened(gateway, f"r{n}", deadline_s=3_600) for n in range(num_rollouts)]
    (process,) = map(psutil.Process, gateway_pids(server))
    return process, [(each["base_url"], {"Authorization": f"Bearer {each['key']}"}) for each in rollouts]


def measure(make_server: MakeServer, tmp_path: Path, engine_url: str, title: str) -> float:
    """Print the table; the share that the gateway adds to a whole call."""
    process, through = gateway_over(make_server, tmp_path, engine_url, CONCURRENCY)
    directly: list[Target] = [(f"{engine_url}/v1", {})] * CONCURRENCY
    rows, shares = [], []
    for ask in (whole, streamed):
        before_s = cpu_s(process)
        pairs = [[asyncio.run(seconds(ask, each)) for each in (directly, through)] for _ in range(ROUNDS + 1)]
        own_s = (cpu_s(process) - before_s) / (len(pairs) * len(through) * CALLS)
        # The first round warms up; the best of the others is what other work on the machine disturbed least.
        engine_s, gateway_s = (min(times) for times in zip(*pairs[1:], strict=True))
        shares.append(gateway_s / engine_s - 1)
        rows.append((ask.__name__, engine_s * 1e3, gateway_s * 1e3, shares[-1] * 100, own_s * 1e3))
    show(title, ("call", "engine, ms", "through the gateway, ms", "more, %", "gateway's CPU, ms"), rows)
    return shares[0]


def test_the_gateway_adds_little_to_a_real_engines_time(make_server: MakeServer, tmp_path: Path) -> None:
    url = os.environ.get("FOREBAY_ENGINE_URL")
    if not url:
        pytest.skip("FOREBAY_ENGINE_URL names no engine")
    share = measure(make_server, tmp_path, url.rstrip("/"), f"{CONCURRENCY} calls at once, {NUM_TOKENS} tokens each")
    assert share <= TARGET


def test_what_a_call_costs_beside_an_engine_that_takes_two_seconds(make_server: MakeServer, tmp_path: Path) -> None:
    """As far as the gateway's own time goes: this engine needs no CPU while it waits."""
    reply = Reply(text="x" * (NUM_TOKENS - 1), delay_s=2.0)
    with ScriptedEngine(lambda _: reply).in_thread() as scripted:
        share = measure(make_server, tmp_path, scripted.url, "an engine of 2 s")
    assert share <= TARGET


async def read_paced(targets: list[Target]) -> int:
    """Read one stream from each target, all at once. Returns the number of chunks."""

    async def read(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> int:
        body = {**BODY, "max_tokens": PACED_TOKENS, "stream": True}
        async with http.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as reply:
            assert reply.status_code == 200
            return b"".join([part async for part in reply.aiter_bytes()]).count(b"data: {")

    async with httpx.AsyncClient(timeout=120) as http:
        return sum(await asyncio.gather(*(read(http, *target) for target in targets)))


def test_a_paced_stream_costs_the_gateway_little_more_than_reading_it_with_httpx(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Both read one chunk per token from the same engine. The gateway also parses, records and passes on each chunk."""
    reply = Reply(text="x" * (PACED_TOKENS - 1), tokens_per_s=TOKENS_PER_S)
    with ScriptedEngine(lambda _: reply).in_thread() as scripted:
        process, through = gateway_over(make_server, tmp_path, scripted.url, PACED_STREAMS)
        rounds = []
        for _ in range(ROUNDS):
            began_s = time.thread_time()
            num_chunks = asyncio.run(read_paced([(f"{scripted.url}/v1", {})] * PACED_STREAMS))
            reader_us = (time.thread_time() - began_s) / num_chunks * 1e6
            began_s = cpu_s(process)
            num_chunks = asyncio.run(read_paced(through))
            rounds.append((reader_us, (cpu_s(process) - began_s) / num_chunks * 1e6))
    reader_us, gateway_us = (min(times) for times in zip(*rounds, strict=True))
    ratio = gateway_us / reader_us
    columns = ("httpx alone, µs a chunk", "gateway, µs a chunk", "ratio")
    show(f"{PACED_STREAMS} streams of {TOKENS_PER_S:.0f} tokens/s", columns, [(reader_us, gateway_us, ratio)])
    assert ratio <= PACED_TARGET
