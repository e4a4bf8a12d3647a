"""What a trace adds to the CPU time of rollouts: the run process with and without one, in turn."""

import asyncio
import json
import statistics
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.web.serving import serve_app
from tests.benchmarks.machines import show

pytestmark = pytest.mark.bench

NUM_ROUNDS = 9
NUM_ROLLOUTS = 32
TARGET = 1.03
REPLY = Reply(text="The river is wide and slow, and nobody has seen its end. " * 4, queue_s=0.001, prefill_s=0.001)


async def write(request: Request) -> Response:
    """A buffer that takes everything."""
    await request.body()
    return JSONResponse({"success": True, "message": "", "data": {}})


async def measure(folder: Path) -> list[tuple[float, float]]:
    """CPU seconds without and with a trace, for each round."""
    app = Starlette(routes=[Route("/buffer/write", write, methods=["POST"])])
    async with ScriptedEngine(lambda _: REPLY) as engine, serve_app(app) as port:
        arguments = (engine.url, f"http://127.0.0.1:{port}", str(folder), str(NUM_ROUNDS), str(NUM_ROLLOUTS))
        module = ("-m", "tests.benchmarks.traced_rollouts")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *module, *arguments, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return [(without, traced) for without, traced in json.loads(printed.splitlines()[-1])]


async def test_a_trace_costs_a_rollout_of_four_turns_next_to_nothing(tmp_path: Path) -> None:
    pairs = await measure(tmp_path)
    without, traced = (statistics.median(each) / NUM_ROLLOUTS * 1e3 for each in zip(*pairs, strict=True))
    ratio = traced / without
    columns = ("without a trace, ms", "with one, ms", "ratio")
    show("CPU of a rollout of four turns", columns, [(without, traced, f"{ratio:.3f}")])
    assert ratio <= TARGET
