"""The built-in task with tools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators import tool_generator

QUESTION = {"prompt": "What is 12 * 12 / 6? Box the answer.", "label": "24"}


def tool_call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def reckons(call: ScriptedCall) -> Reply:
    """Two calls at once, then one of what they answered, then the answer."""
    answers = [message["content"].strip() for message in call.messages if message["role"] == "tool"]
    if not answers:
        calls = [tool_call("calculator", "c1", expression="12 * 12"), tool_call("python", "c2", code="print(2 * 3)")]
        return Reply(text="Let me see.", tool_calls=calls)
    if len(answers) == 2:
        return Reply(tool_calls=[tool_call("calculator", "c3", expression=" / ".join(answers))])
    return Reply(text=f"It is \\boxed{{{answers[-1]}}}.")


async def rolled_out(engine: ScriptedEngine, buffer: Any, rows: Path, **payload: Any) -> list[dict[str, Any]]:
    """The samples that a run of the task makes."""
    data = {
        "task_type": "tool",
        "remote_engine_url": engine.url,
        "remote_buffer_url": buffer.url,
        "input_file": str(rows),
        "sampling_params": {"max_tokens": 512},
        **payload,
    }
    async with asyncio.timeout(60):
        await asyncio.to_thread(tool_generator.run_rollout, data)
    return list(buffer.samples)


async def test_tools_are_called_until_the_answer(buffer, write_rows) -> None:
    async with ScriptedEngine(reckons) as engine:
        samples = await rolled_out(engine, buffer, write_rows(QUESTION))
        offered = [tool["function"]["name"] for tool in engine.calls[0].body["tools"]]
    assert offered == ["calculator", "python"]
    assert [sample["reward"] for sample in samples] == [1.0, 1.0]
    roles = [message["role"] for message in samples[0]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [m["content"] for m in samples[0]["messages"] if m["role"] == "tool"] == ["144", "6\n", "24.0"]
    assert samples[0]["extra_info"]["finish_reason"] == "stop"


async def test_turns_are_limited(buffer, write_rows) -> None:
    def never_ends(call: ScriptedCall) -> Reply:
        return Reply(text="\\boxed{24}", tool_calls=[tool_call("calculator", f"c{call.number}", expression="1")])

    async with ScriptedEngine(never_ends) as engine:
        samples = await rolled_out(engine, buffer, write_rows(QUESTION), max_turns="3")
        assert len(engine.calls) == 2 * 3
    assert {sample["extra_info"]["finish_reason"] for sample in samples} == {"max_turns"}
    assert {sample["outcome"] for sample in samples} == {"truncated"}
    assert {sample["messages"][-1]["role"] for sample in samples} == {"assistant"}


@pytest.mark.parametrize("told", ["many", 0, -1, 2.5])
def test_a_wrong_limit_is_named(told: object) -> None:
    data = {"remote_engine_url": "http://engine", "remote_buffer_url": "http://buffer", "input_file": "none"}
    with pytest.raises(InvalidInput, match="max_turns must be a whole number"):
        tool_generator.run_rollout({**data, "max_turns": told})


def test_the_template_is_short() -> None:
    assert len(Path(tool_generator.__file__).read_text().splitlines()) <= 60
