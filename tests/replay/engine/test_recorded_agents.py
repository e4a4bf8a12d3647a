"""Runs of agents on a recorded engine: the tokens and logprobs that were recorded, with the engine gone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.replay import EngineRecorder, RecordedEngine
from tests.conftest import MakeServer
from tests.examples import agent_scripts
from tests.kit import NativeRun, ServerProcess, poll_until, write_generator

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENTS = {"openai_agents": "openai_agents/products.jsonl", "anthropic_agent": "anthropic_agent/countries.jsonl"}
LIMIT_S = 240.0
GROUP_SIZE = 8
STREAMS = """
from openai import AsyncOpenAI
from forebay.generators.agent import AgentGenerator

TASK_TYPE = "streams"


async def agent(task):
    said = ""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        asked = [{"role": "user", "content": task.question}]
        async for chunk in await client.chat.completions.create(model=task.model, messages=asked, stream=True):
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
    return said


def reward_func(item):
    return float(len(item["agent"]["output"]))


def run_rollout(data):
    AgentGenerator.from_payload(data).run_agent(data["input_file"], agent, reward_func)
"""
Rollouts = dict[tuple[Any, int, int], Any]
"""By instance, slot, and place among the samples of a rollout: what was sampled, and what it was worth."""


def uses_a_tool(call: ScriptedCall) -> Reply:
    """No two answers are alike: which of them a rollout got shows in its tokens."""
    answers = [message["content"].strip() for message in call.messages if message["role"] == "tool"]
    if answers:
        return Reply(text=f"\\boxed{{{answers[-1]}}}, says answer {call.number}.", delay_s=0.01 * (call.number % 3))
    function = {"name": "calculator", "arguments": json.dumps({"expression": f"{call.number} * 2"})}
    calls = [{"id": f"c{call.number}", "type": "function", "function": function}]
    return Reply(text=f"Let me see, {call.number}.", tool_calls=calls, delay_s=0.01 * (call.number % 3))


def scripted(call: ScriptedCall) -> Any:
    """What the agents of the examples need, and for the tool task answers that differ."""
    offered = [tool["function"]["name"] for tool in call.body.get("tools") or []]
    if call.body.get("stream"):
        return Reply(text=f"It is the {call.number}th answer.", tokens_per_s=2_000)
    return uses_a_tool(call) if "calculator" in offered else agent_scripts.answer(call)


@pytest.fixture
def server(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    folder = tmp_path / "generators"
    folder.mkdir()
    for data in AGENTS.values():
        for path in (EXAMPLES / data).parent.glob("*.py"):
            shutil.copy(path, folder)
    write_generator(folder, STREAMS, "streams_generator.py")
    return make_server(generators=folder, start_wait_s=60)


def rolled_out(server: ServerProcess, engine_url: str, rows: Path) -> dict[str, Rollouts]:
    """What came of a run of each agent, and of one of the tool task."""
    common = {"remote_engine_url": engine_url, "min_valid_group_size_ratio": 0, "sampling_params": {"max_tokens": 256}}
    groups = {"input_file": str(rows), "group_size": GROUP_SIZE}
    runs = {name: server.start_run(name, **groups, **common) for name in ("tool", "streams")}
    for name, data in AGENTS.items():
        runs[name] = server.start_run(name, input_file=str(EXAMPLES / data), group_size=1, **common)
    return {name: samples_of(run) for name, run in runs.items()}


def samples_of(run: NativeRun) -> Rollouts:
    poll_until(lambda: run.view()["state"] != "running", LIMIT_S)
    assert run.view()["state"] == "finished", run.view()
    found: Rollouts = {}
    for group in run.groups():
        stored = run.client.get(f"{run.path}/groups/{group['group_id']}?bodies=true").json()["samples"]
        stored.sort(key=lambda sample: (sample["slot"], str(sample["body"]["messages"][0])))
        for number, sample in enumerate(stored):
            body = sample["body"]
            assert body.get("error") is None, body
            sampled = {name: body[name] for name in ("tokens", "loss_mask", "logprobs", "messages", "reward")}
            found[group["instance_id"], sample["slot"], number] = sampled
    return found


@pytest.mark.soak
def test_agents_get_the_tokens_that_were_recorded(server: ServerProcess, tmp_path: Path) -> None:
    file, rows = tmp_path / "calls.fbr", tmp_path / "rows.jsonl"
    questions = [{"instance_id": f"q{number}", "prompt": f"What is {number} * 2?", "label": "0"} for number in range(3)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in questions))
    with ScriptedEngine(scripted).in_thread() as engine, EngineRecorder(file, engine.url).in_thread() as recorder:
        recorded = rolled_out(server, recorder.url, rows)
        num_calls = len(engine.calls)
    with RecordedEngine(file).in_thread() as replayed:
        assert rolled_out(server, replayed.url, rows) == recorded
        assert replayed.misses == []
        assert len(replayed.calls) >= num_calls
    for name in ("tool", "streams"):
        texts = [str(sample["messages"]) for sample in recorded[name].values()]
        assert len({*texts}) == len(texts) == 3 * GROUP_SIZE
