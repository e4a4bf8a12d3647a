"""What a sample tells, besides what it is made of, so that it can be used again: its row, and what its reward saw."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from forebay.core.task_row import parse_row
from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.generators.agent_kit import stored
from tests.kit import NativeRun, poll_until, write_generator

TASK = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "graded"
async def rollout(client, messages, params):
    client.rollout.for_reward.update(client.rollout.row.get("hand", {}))
    return await single_turn(client, messages, params)
async def reward(item):
    if item.get("unjudged"):
        raise ValueError("no verdict")
    return float(len(item.get("notes", "")) > 70_000)
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout, reward, 1)
"""
ROWS: list[dict[str, Any]] = [
    {"instance_id": "none", "prompt": "q"},
    {"instance_id": "some", "prompt": "q", "hand": {"notes": "short", "tests": [1, {"é": None}]}},
    {"instance_id": "much", "prompt": "q", "hand": {"notes": "x" * 80_000}},
    {"instance_id": "unjudged", "prompt": "q", "hand": {"unjudged": True}},
    {"instance_id": "column", "prompt": "q", "row": 7},
]


async def bodies_of(run: NativeRun) -> dict[str, Any]:
    return {name: body for name, (body,) in (await asyncio.to_thread(stored, run)).items()}


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_samples_keep_what_their_rollout_handed_its_reward_function(
    make_server: MakeServer, tmp_path: Path, num_workers: int
) -> None:
    server = make_server(start_wait_s=60)
    write_generator(server.generators, TASK, "graded_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    async with ScriptedEngine(lambda _: "4") as engine:
        given: dict[str, Any] = {"remote_engine_url": engine.url, "input_file": str(rows), "max_attempts": 1}
        if num_workers:
            given["workers"] = num_workers
        run = await asyncio.to_thread(server.start_run, "graded", 1, **given)
        bodies = await bodies_of(run)
    assert "for_reward" not in bodies["none"]
    assert bodies["some"]["for_reward"] == ROWS[1]["hand"]
    assert (bodies["much"]["for_reward"], bodies["much"]["reward"]) == (None, 1.0), "it is too large to be kept"
    assert (bodies["unjudged"]["outcome"], bodies["unjudged"]["for_reward"]) == ("judge_failure", {"unjudged": True})
    digests = {row["instance_id"]: parse_row(json.dumps(row, indent=1).encode(), 0).digest for row in ROWS}
    told = {name: body["extra_info"]["row"] for name, body in bodies.items()}
    assert told == digests | {"column": 7}, "a row's own field is left alone"
    poll_until(lambda: run.view()["input_sha256"] == sha256(rows.read_bytes()).hexdigest())


def test_the_digest_of_a_row_changes_with_what_it_says_alone() -> None:
    lines = ['{"prompt":"é","n":[1,2]}', '{ "n": [1, 2], "prompt": "\\u00e9"}', '{"prompt":"é","n":[2,1]}']
    first, other_order, changed = (parse_row(line.encode(), number).digest for number, line in enumerate(lines))
    assert first == other_order != changed
    assert len(first) == len(bytes.fromhex(first)) * 2 == 16
    huge = b'{"prompt": "q", "n": 123456789012345678901234567890}'
    told = [parse_row(line, 0).digest for line in (huge, b" " + huge, huge.replace(b"1", b"2"))]
    assert told[0] == told[1] != told[2]
