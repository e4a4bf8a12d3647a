"""Traces of runs on a real server: agents behind the gateway, and that no word of anybody stands in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.telemetry.tracing.records import RolloutSummary, Span
from forebay.telemetry.tracing.trace_ids import read_traceparent, trace_id
from tests.conftest import MakeServer
from tests.generators.agent_kit import LIMIT_S, stored
from tests.generators.run_trace_kit import RecordedRun, S
from tests.kit import NativeRun, ServerProcess, poll_until, write_generator
from tests.lent import lent_url

PROMPT, REPLY, ARGUMENT, API_KEY = "canary-prompt-1", "canary-reply-2", "canary-argument-3", "canary-key-4"
PRINTED = "canary-printed-5"
AGENT = """
import asyncio, sys
from openai import AsyncOpenAI
from forebay.generators.agent import AgentGenerator
from forebay.telemetry import span, traceparent

TASK_TYPE = "traced_agent"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

async def agent(task):
    print(f"key: {task.api_key}", flush=True)
    await asyncio.sleep(0.2)
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages = list(task.prompt)
        asked = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        call = asked.choices[0].message.tool_calls[0]
        await asyncio.sleep(0.3)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "found"}
        messages = [*messages, asked.choices[0].message, answer]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    await asyncio.sleep(0.2)
    return {"of_task": task.traceparent, "current": traceparent()}

def reward(item):
    return float(item["agent"]["output"]["of_task"] != "")

def run_rollout(data):
    print(f"lent: {data['remote_buffer_url']} whole", flush=True)
    AgentGenerator.from_payload(data).run_agent(data["input_file"], agent, reward)
"""
COMMAND = (
    AGENT.replace('"traced_agent"', '"traced_command"')
    .replace(
        'run_agent(data["input_file"], agent, reward)',
        'run_agent(data["input_file"], [sys.executable, data["program"]], reward)',
    )
    .replace('float(item["agent"]["output"]["of_task"] != "")', 'float(item["agent"]["output"].strip() != "")')
)
PROGRAM = """
import os
from openai import OpenAI
OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
print(os.environ["TRACEPARENT"])
"""
TOOLS = """
from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.sandbox import Sandbox
from forebay.generators.tools import ToolBox
from forebay.telemetry import span

TASK_TYPE = "traced_tools"

async def look(key: str) -> str:
    "Look."
    async with Sandbox() as box:
        return (await box.run("echo PRINTED " + key)).stdout

async def rollout(client, messages, params):
    box = ToolBox([look])
    messages, _ = await single_turn(client, messages, params, box.definitions)
    messages = [*messages, *await box.answer(messages[-1]["tool_calls"])]
    if client.rollout.instance_id == "fails":
        raise ValueError(str(messages))
    return await single_turn(client, messages, params, box.definitions)

def reward(item):
    return 1.0

def run_rollout(data):
    print(f"lent: {data['remote_buffer_url']} whole", flush=True)
    BaseGenerator.from_payload(data, max_attempts=1).entry(data["input_file"], rollout, reward)
""".replace("PRINTED", PRINTED)


def script(call: ScriptedCall) -> Reply:
    is_asked = bool(call.body.get("tools")) and call.messages[-1]["role"] == "user"
    function = {"name": "look", "arguments": json.dumps({"key": ARGUMENT})}
    unknown = {"name": REPLY, "arguments": "{}"}
    calls = [{"id": f"call_{n}", "type": "function", "function": each} for n, each in enumerate((function, unknown))]
    return Reply(text=REPLY, tool_calls=calls if is_asked else [], queue_s=0.05, prefill_s=0.05, delay_s=0.2)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(script)
    with engine.in_thread():
        yield engine


@pytest.fixture(scope="module")
def own_server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    for name, source in (("agent", AGENT), ("command", COMMAND), ("tools", TOOLS)):
        write_generator(folder, source, f"traced_{name}_generator.py")
    return module_servers(generators=folder, start_wait_s=60)


def finished(server: ServerProcess, task_type: str, engine: ScriptedEngine, folder: Path, **payload: Any) -> NativeRun:
    """A run of one rollout that has come to its end."""
    rows = folder / "rows.jsonl"
    instances = payload.pop("instances", ["one"])
    rows.write_text("".join(json.dumps({"instance_id": each, "prompt": PROMPT}) + "\n" for each in instances))
    payload = {"input_file": str(rows), "remote_engine_url": engine.url, "group_size": 1, **payload}
    run = server.start_run(task_type, **payload)
    poll_until(lambda: run.view()["state"] not in ("validating", "running"), LIMIT_S)
    return run


def written_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def recorded(server: ServerProcess, run: NativeRun) -> RecordedRun:
    """What the run's processes have written."""
    found = RecordedRun(server.data_dir / "runs" / run.run_id)
    poll_until(lambda: found.of(RolloutSummary))
    return found


def test_an_agents_turns_lie_within_its_environment(own_server, engine, tmp_path: Path) -> None:
    run = finished(own_server, "traced_agent", engine, tmp_path)
    (sample,) = stored(run)["one"]
    trace = recorded(own_server, run)
    (summary,) = trace.of(RolloutSummary)
    assert sum(summary.phases.values()) == pytest.approx(summary.d, rel=0.01)
    spent = {name: ns / S for name, ns in summary.phases.items()}
    least = {"environment": 0.4, "tool": 0.3, "engine_queue": 0.1, "prefill": 0.1, "decode": 0.4}
    assert {name: spent[name] >= 0.95 * seconds for name, seconds in least.items()} == dict.fromkeys(least, True), spent
    first, second = summary.turns
    assert (first.has_tools, second.has_tools, first.engine) == (True, False, engine.url)
    assert summary.sampled == first.sampled + second.sampled > 0
    timings = sample["extra_info"]["timings"]
    assert (timings["turns"], timings["tool"] >= 0.29) == (2, True)
    parts = [spent for name, spent in timings.items() if name not in ("total", "turns")]
    assert sum(parts) == pytest.approx(timings["total"], rel=0.01)


def test_a_commands_own_spans_are_children_of_its_rollout(own_server, engine, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = finished(own_server, "traced_command", engine, tmp_path, program=str(program))
    trace = recorded(own_server, run)
    (summary,) = trace.of(RolloutSummary)
    assert (summary.ending, summary.reward) == ("finished", 1.0)
    # The gateway writes by itself.
    turns = poll_until(lambda: trace.of(Span, uid=summary.uid, name="turn"))
    assert [turn.up for turn in turns] == [summary.id]
    calls = [read_traceparent(call.traceparent) for call in engine.calls if call.prompt == "go"]
    assert [call.trace_id for call in calls if call] == [trace_id(run.run_id, summary.uid)]


def test_no_word_of_a_prompt_a_reply_an_argument_or_a_key_is_in_any_file(own_server, engine, tmp_path: Path) -> None:
    run = finished(
        own_server, "traced_tools", engine, tmp_path, instances=["one", "fails"], api_key=API_KEY, trace_rate="1"
    )
    agents = finished(own_server, "traced_agent", engine, tmp_path, api_key=API_KEY)
    for each in (run, agents):
        trace = recorded(own_server, each)
        # The server and the gateway write by themselves.
        poll_until(lambda: all(word in written_in(trace.trace_dir) for word in (b'"tool"', b'"kind":"group"')))  # noqa: B023
        written = written_in(trace.trace_dir)
        key = lent_url(own_server, each.run_id).rpartition("/")[2]
        said = each.client.get(f"{each.path}/log").json()["lines"]
        own_keys = [line.partition("key: ")[2] for line in said if line.startswith("key: ")]
        assert len(own_keys) == (each is agents)
        for canary in (PROMPT, REPLY, ARGUMENT, PRINTED, API_KEY, key, *own_keys):
            assert canary.encode() not in written, canary
    tools = recorded(own_server, run)
    assert {span.at.get("tool") for span in tools.of(Span, name="tool")} == {"look"}
    assert [summary.ending for summary in tools.of(RolloutSummary, instance="fails")] == ["failed"]


def test_a_run_says_of_how_many_groups_it_keeps_spans(own_server, engine, tmp_path: Path) -> None:
    run = finished(own_server, "traced_tools", engine, tmp_path, trace_rate=0)
    trace = recorded(own_server, run)
    assert [summary.has_spans for summary in trace.of(RolloutSummary)] == [False]
    assert trace.of(Span) == []
