"""``longest-first`` in real runs: what an earlier run of the same input has recorded orders the next one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import ServerProcess, write_generator

TASK = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "lengths"
async def reward(item):
    return 1.0
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward, data.get("num_epoch", 1))
"""
WORDS = {"short": 1, "long": 40, "middle": 10, "longer": 60}


def script(call: ScriptedCall) -> str:
    return "word " * WORDS[call.messages[-1]["content"]]


@pytest.fixture(scope="module")
def lengths_server(module_servers: MakeServer) -> ServerProcess:
    server = module_servers(start_wait_s=60)
    write_generator(server.generators, TASK, "lengths_generator.py")
    return server


def rows_in(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"instance_id": name, "prompt": name}) + "\n" for name in WORDS))
    return str(path)


async def order_of(server: ServerProcess, input_file: str, **payload: Any) -> list[str]:
    """The prompts of a whole run in the order in which its engine was asked, one at a time."""
    async with ScriptedEngine(script) as engine:
        given = {"remote_engine_url": engine.url, "num_process": 1, "input_file": input_file, **payload}
        run = await asyncio.to_thread(server.start_run, "lengths", 1, **given)
        view = await asyncio.to_thread(run.wait_for_state, "finished")
        assert view["samples"]["member"] == len(engine.calls)
    return [call.messages[-1]["content"] for call in engine.calls]


LONGEST_FIRST = {"policy": "longest-first"}
LONG_TO_SHORT = sorted(WORDS, key=lambda name: -WORDS[name])


async def test_an_earlier_run_of_the_same_input_orders_the_next(lengths_server: ServerProcess, tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    assert await order_of(lengths_server, rows) == list(WORDS)
    assert await order_of(lengths_server, rows, scheduler=LONGEST_FIRST) == LONG_TO_SHORT
    (tmp_path / "copy").mkdir()
    assert await order_of(lengths_server, rows_in(tmp_path / "copy"), scheduler=LONGEST_FIRST) == LONG_TO_SHORT


async def test_other_inputs_are_nothing_to_go_by(lengths_server: ServerProcess, tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    Path(rows).write_text(Path(rows).read_text() + "\n")
    assert await order_of(lengths_server, rows, scheduler=LONGEST_FIRST) == list(WORDS)
