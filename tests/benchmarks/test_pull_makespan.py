"""Two engines, one twice as fast, in real seconds: ``pull`` against ``static``, which waits for the slow one."""

import asyncio
import json
import math
import random
from pathlib import Path

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.telemetry.tracing.records import RolloutSummary
from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.kit import ServerProcess, write_generator
from tests.telemetry.trace_kit import records_in

pytestmark = pytest.mark.bench

TASK = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "paced"
async def reward(item):
    return 1.0
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward)
"""
NUM_GROUPS, GROUP_SIZE, NUM_PLACES = 32, 4, 16
MEDIAN_TOKENS, DEVIATION = 60, 0.4
SLOW, FAST = 50.0, 100.0
"""Tokens a second of each rollout."""
NUM_ROUNDS = 2
MOST = 0.85


def paced(tokens_per_s: float):
    """An engine of that speed, whose answers to a prompt are as long as at any other."""
    draws: dict[str, random.Random] = {}

    def script(call: ScriptedCall) -> Reply:
        prompt = call.messages[-1]["content"]
        draw = draws.setdefault(prompt, random.Random(prompt))
        num_tokens = max(1, int(MEDIAN_TOKENS * math.exp(draw.gauss(0, DEVIATION))))
        return Reply(text="a" * num_tokens, tokens_per_s=tokens_per_s)

    return ScriptedEngine(script)


async def makespan_s(server: ServerProcess, input_file: Path, policy: str) -> float:
    """From the first rollout's start to the last one's end, as the run's own trace has it."""
    async with paced(SLOW) as slow, paced(FAST) as fast:
        payload = {"remote_engine_url": f"{slow.url},{fast.url}", "num_process": NUM_PLACES}
        run = await asyncio.to_thread(
            server.start_run,
            "paced",
            GROUP_SIZE,
            input_file=str(input_file),
            scheduler={"policy": policy},
            **payload,
        )
        view = await asyncio.to_thread(run.wait_for_state, "finished")
        assert view["samples"]["member"] == NUM_GROUPS * GROUP_SIZE
    records = records_in(server.data_dir / "runs" / run.run_id / "trace")
    summaries = [record for record in records if isinstance(record, RolloutSummary)]
    assert len(summaries) == NUM_GROUPS * GROUP_SIZE
    return (max(one.t + one.d for one in summaries) - min(one.started for one in summaries)) / 1e9


async def test_a_fast_engine_is_not_kept_waiting_for_a_slow_one(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(start_wait_s=60)
    write_generator(server.generators, TASK, "paced_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instance_id": f"{n}", "prompt": f"q{n}"}) + "\n" for n in range(NUM_GROUPS)))
    pairs = [
        (await makespan_s(server, rows, "static"), await makespan_s(server, rows, "pull")) for _ in range(NUM_ROUNDS)
    ]
    static_s, pull_s = (min(each) for each in zip(*pairs, strict=True))
    columns = ("static, s", "pull, s", "ratio")
    show("Makespan on engines of speeds 1:2", columns, [(static_s, pull_s, f"{pull_s / static_s:.3f}")])
    assert pull_s <= MOST * static_s
