"""Each segment of a sample says how it was sampled; the log says once that logprobs are not the policy's."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.client.tensors import collate
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, single_turn
from tests.generators.conftest import FakeBuffer

Samples = list[dict[str, Any]]
WriteRows = Callable[..., Path]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "extra_body": {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "min_tokens": 0},
}
UNKNOWN = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))


async def reward(item: dict[str, Any]) -> float:
    return 1.0


def asking(is_stream: bool, *calls: dict[str, Any]) -> Any:
    """A rollout function with one turn for each of ``calls``, what it is asked with."""

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        for asked in calls:
            reply = await client.chat.completions.create(model="m", messages=messages, stream=is_stream, **asked)
            if is_stream:
                chunks = [chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices]
                answer = "".join(chunks)
            else:
                answer = reply.choices[0].message.content
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
        return messages[:-1], "stop"

    return rollout


async def rolled_out(
    buffer: FakeBuffer, write_rows: WriteRows, rollout: Any, engine: ScriptedEngine, size: int = 1
) -> Samples:
    buffer.plan["group_size"] = size
    async with engine, asyncio.timeout(30):
        generator = BaseGenerator(engine.url, buffer.url, size, max_attempts=1)
        await generator.run_async(write_rows({"prompt": "go"}), rollout, reward)
    assert [sample.get("error") for sample in buffer.samples] == [None] * len(buffer.samples)
    return buffer.samples


def told(sample: dict[str, Any]) -> list[Any]:
    return [span.get("sampling") for span in sample["token_spans"] if span["source"] == "llm"]


def engine(**started_with: Any) -> ScriptedEngine:
    made = ScriptedEngine(lambda _: "x")
    made.started_with.update(started_with)
    return made


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing said": ({}, {}),
    "neutral": (NEUTRAL, {}),
    "temperature": ({"temperature": 0.7}, {"temperature": 0.7}),
    "greedy": ({"temperature": 0}, {"temperature": 0}),
    "penalties": (
        {"presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.1}},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    ),
    "bias": ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
    "truncation": (
        {"top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.1}},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.1},
    ),
    "least length": ({"extra_body": {"min_tokens": 2}}, {"min_tokens": 2}),
    "json": ({"response_format": SCHEMA}, {"grammar": "response_format"}),
    "regex": ({"extra_body": {"regex": "x"}}, {"grammar": "regex"}),
    "required tool": ({"tools": [TOOL], "tool_choice": "required"}, {"grammar": "tool_choice"}),
    "strict tool": ({"tools": [STRICT]}, {"grammar": "tools"}),
    "tool": ({"tools": [TOOL]}, {}),
    "no tool": ({"tools": [STRICT], "tool_choice": "none"}, {}),
}
"""What is asked for, and what the segment says of it."""


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_each_turn_says_what_differs_from_the_policy(
    buffer: FakeBuffer, write_rows: WriteRows, is_stream: bool
) -> None:
    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        for name, (asked, _) in CALLS.items():
            messages = [{"role": "user", "content": name}]
            reply = await client.chat.completions.create(model="m", messages=messages, stream=is_stream, **asked)
            if is_stream:
                assert [chunk async for chunk in reply]
        return messages, "stop"

    samples = await rolled_out(buffer, write_rows, rollout, engine())
    by_name = {sample["messages"][0]["content"]: told(sample) for sample in samples}
    assert by_name == {name: [expected] for name, (_, expected) in CALLS.items()}


async def test_turns_that_were_sampled_otherwise_can_be_left_out(buffer: FakeBuffer, write_rows: WriteRows) -> None:
    (sample,) = await rolled_out(buffer, write_rows, asking(False, {}, {"temperature": 0.5}, {}), engine())
    assert told(sample) == [{}, {"temperature": 0.5}, {}]
    kept, whole = collate([sample], 0, only_policy_logprobs=True), collate([sample], 0)
    _, second, _ = [span for span in sample["token_spans"] if span["source"] == "llm"]
    expected = whole["loss_mask"][0].clone()
    expected[second["start"] : second["end"]] = False
    assert kept["loss_mask"][0].tolist() == expected.tolist()


async def test_a_call_that_is_gone_on_with_keeps_how_it_was_sampled(buffer: FakeBuffer, write_rows: WriteRows) -> None:
    def script(call: ScriptedCall) -> Reply:
        return Reply(text="two") if call.said else Reply(text="one ", finish_reason="abort")

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await single_turn(client, messages, {"temperature": 0.8, "max_tokens": 20})

    (sample,) = await rolled_out(buffer, write_rows, rollout, ScriptedEngine(script))
    assert sample["extra_info"]["capture"]["merged"] == 1
    assert told(sample) == [{"temperature": 0.8}]
    assert sum(sample["loss_mask"]) == len("one two") + 1


@pytest.mark.parametrize(
    ("files", "started_with", "expected"),
    [
        (
            {"config.json": {}, "generation_config.json": {"temperature": 0.6, "top_k": 20}},
            {},
            {"temperature": 0.6, "top_k": 20},
        ),
        ({"config.json": {}, "generation_config.json": {"temperature": 1.0}}, {}, {}),
        ({"config.json": {}, "generation_config.json": {}}, {"version": "0.5.2"}, {"top_k": None}),
        ({"config.json": {}}, {}, {}),
        ({}, {}, UNKNOWN),
        ({}, {"model_path": "a folder that cannot be looked into".ljust(300, "!")}, UNKNOWN),
        ({"config.json": {}, "generation_config.json": []}, {}, UNKNOWN),
        ({}, {"sampling_defaults": "later"}, UNKNOWN),
        ({}, {"sampling_defaults": "openai"}, {}),
    ],
)
async def test_what_a_call_leaves_out_is_what_the_engine_takes_or_unknown(
    buffer: FakeBuffer,
    write_rows: WriteRows,
    tmp_path: Path,
    files: dict[str, Any],
    started_with: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    started = {"sampling_defaults": "model", "model_path": str(model)} | started_with
    (sample,) = await rolled_out(buffer, write_rows, asking(False, {}), engine(**started))
    assert told(sample) == [expected]
    (row,) = collate([sample], 0, only_policy_logprobs=True)["loss_mask"].tolist()
    assert any(row) is (not expected)


@pytest.mark.parametrize(
    ("engine_parser", "tools", "expected"),
    [(None, [STRICT], {}), ("kimi_k3", [TOOL], {"grammar": "tools"}), ("qwen25", [TOOL], {})],
)
async def test_whether_tools_bring_a_grammar_depends_on_the_engines_parser(
    buffer: FakeBuffer, write_rows: WriteRows, engine_parser: str | None, tools: list[Any], expected: dict[str, Any]
) -> None:
    started = engine(tool_call_parser=engine_parser)
    (sample,) = await rolled_out(buffer, write_rows, asking(False, {"tools": tools}), started)
    assert told(sample) == [expected]


async def test_the_log_says_it_once(
    buffer: FakeBuffer, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await rolled_out(buffer, write_rows, asking(False, {}, {"temperature": 0.5}, {"top_p": 0.5}), engine(), 3)
    (said,) = [record.message for record in caplog.records if "not all the policy's" in record.message]
    assert '{"temperature":0.5}' in said or '{"top_p":0.5}' in said
    assert "only_policy_logprobs=True" in said
    assert buffer.plan["run_id"] in said


async def test_the_log_says_what_is_not_known(
    buffer: FakeBuffer, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await rolled_out(buffer, write_rows, asking(False, {}), engine(sampling_defaults="model", model_path="hub/x"))
    (said,) = [record.message for record in caplog.records if "not all the policy's" in record.message]
    assert "left out temperature, top_p, top_k, min_p, repetition_penalty" in said


async def test_at_the_policys_own_distribution_nothing_is_said(
    buffer: FakeBuffer, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await rolled_out(buffer, write_rows, asking(False, {}, NEUTRAL), engine())
    assert "policy" not in caplog.text
