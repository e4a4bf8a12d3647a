"""Answers that the engine aborts are gone on with: the agent sees none of it, and the record has every token."""

import asyncio
import json
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.gateway.recording import rest_of
from forebay.gateway.refusals import EngineLost
from tests.engines.fake_vllm import FakeVLLM
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import USER, Json, OpenedAt, assert_whole, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = {"sglang": ScriptedEngine, "vllm": FakeVLLM}

TEXT = "one two three four five six seven eight nine ten"
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def rest_of_text(call: ScriptedCall) -> Reply:
    """The first part hangs after five words; every other one says the rest."""
    words = TEXT.split(" ")
    return Reply(text=TEXT[len(call.said) :]) if call.said else Reply(text=" ".join(words[:5]), hang=True)


async def aborted_once(stage: Stage, asking: "asyncio.Task[Any]") -> Any:
    """What ``asking`` brings, after its first request was aborted."""
    await stage.busy()
    await eventually(lambda: bool(stage.calls[0].sampled_ids))
    await stage.abort(stage.calls[0])
    return await asking


async def streamed(rollout: OpenedAt, **fields: Any) -> list[Json]:
    """The chunks of a streamed chat."""
    reply = await rollout.post("chat/completions", {"model": "m", "messages": [USER], "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]", reply.text
    return [json.loads(line) for line in lines[:-1]]


async def test_a_whole_answer_is_gone_on_with(stage: Stage) -> None:
    stage(rest_of_text)
    rollout = await stage.open()
    asking = asyncio.create_task(rollout.chat(max_tokens=100, logprobs=True))
    reply = await aborted_once(stage, asking)
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
    first, second = stage.calls
    assert second.body["max_tokens"] == 100 - len(first.sampled_ids)
    assert second.prompt_ids == first.prompt_ids + first.sampled_ids
    assert reply["usage"]["completion_tokens"] == len(TEXT) + 1 == len(choice["logprobs"]["content"])
    told = await rollout.close()
    (sample,) = told["samples"]
    assert_whole(sample)
    assert sample["tokens"] == [*second.prompt_ids, *second.sampled_ids]
    assert sum(sample["loss_mask"]) == len(TEXT) + 1
    assert (told["num_calls"], told["counters"]["continued"], told["failures"]) == (1, 1, [])


async def test_a_streamed_answer_is_gone_on_with(stage: Stage) -> None:
    stage(rest_of_text)
    rollout = await stage.open()
    asking = asyncio.create_task(streamed(rollout, stream_options={"include_usage": True}))
    chunks = await aborted_once(stage, asking)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXT
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(TEXT) + 1
    (sample,) = (await rollout.close())["samples"]
    assert sum(sample["loss_mask"]) == len(TEXT) + 1
    assert sample["messages"][-1]["content"] == TEXT


async def test_the_budget_that_the_first_part_has_used_up_ends_the_answer(stage: Stage) -> None:
    stage(rest_of_text)
    rollout = await stage.open()
    asking = asyncio.create_task(rollout.chat(max_tokens=len("one two three four five")))
    await stage.busy()
    reply = await aborted_once(stage, asking) if not asking.done() else await asking
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(stage.calls) == 1


async def test_an_abort_before_the_first_token_asks_again(stage: Stage) -> None:
    stage(lambda call: Reply(text="", hang=True) if call is stage.calls[0] else "now")
    rollout = await stage.open()
    asking = asyncio.create_task(rollout.chat())
    await stage.busy()
    await stage.abort(stage.calls[0])
    assert (await asking)["choices"][0]["message"]["content"] == "now"
    assert_whole((await rollout.close())["samples"][0])


async def test_each_of_several_choices_is_gone_on_with_by_itself(stage: Stage) -> None:
    def script(call: ScriptedCall) -> Reply:
        if call.said:
            return Reply(text=f" and more after {call.said}")
        return Reply(text="whole" if call.choice == 0 else f"part {call.choice}", hang=call.choice > 0)

    stage(script)
    rollout = await stage.open()
    asking = asyncio.create_task(rollout.chat(n=3))
    await stage.busy(2)
    await stage.abort(None)
    texts = [choice["message"]["content"] for choice in (await asking)["choices"]]
    assert texts == ["whole", "part 1 and more after part 1", "part 2 and more after part 2"]
    assert len((await rollout.close())["samples"]) == 3


async def test_an_engine_that_aborts_everything_is_given_up_in_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.engines.continuation.continued_call.MAX_EMPTY_PARTS", 2)
    stage(Reply(finish_reason="abort"))
    rollout = await stage.open()
    reply = await rollout.post("chat/completions", {"messages": [USER]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_lost")
    assert [failure["kind"] for failure in (await rollout.close())["failures"]] == ["engine"]


async def test_a_tool_call_that_was_whole_when_its_stream_was_aborted_is_kept(stage: Stage) -> None:
    call: Json = {"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    stage(lambda asked: "" if asked.said else Reply(tool_calls=[call], hang=True))
    rollout = await stage.open()
    chunks = await aborted_once(stage, asyncio.create_task(streamed(rollout, tools=[TOOL], temperature=1)))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    told = [delta for choice in choices for delta in choice["delta"].get("tool_calls") or []]
    assert "".join(delta["function"].get("arguments") or "" for delta in told) == call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert_whole((await rollout.close())["samples"][0])


def message(content: str, *arguments: str) -> Json:
    calls = [
        {"id": f"c{place}", "function": {"name": "add", "arguments": each}} for place, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("seen", "whole"),
    [
        (message("four, I"), message("five")),
        (message("", '{"a": 1'), message("", '{"b": 1}')),
        (message("", '{"a": 1'), message('<tool_call>{"a": 1 no call')),
    ],
)
async def test_a_rest_that_does_not_fit_what_has_gone_out_is_an_error(seen: Json, whole: Json) -> None:
    with pytest.raises(EngineLost, match="was aborted"):
        rest_of(seen, whole)


async def test_the_rest_of_a_tool_call_is_told_with_the_calls_after_it() -> None:
    whole = message("", '{"a": 1}', "{}")
    delta = rest_of(message("", '{"a"'), whole)
    assert delta == {
        "tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, **whole["tool_calls"][1]}]
    }


async def test_an_answer_to_an_image_is_asked_for_again(stage: Stage) -> None:
    # Its token ids have the image's placeholders expanded, so the engine could not read the image beside them.
    stage(lambda call: Reply(text="a cat") if call.number > first else Reply(text="a ca", hang=True))
    first = len(stage.engine.calls)
    rollout = await stage.open()
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    asking = asyncio.create_task(rollout.chat(shown))
    reply = await aborted_once(stage, asking)
    assert reply["choices"][0]["message"]["content"] == "a cat"
    assert [("input_ids" in call.body, call.messages == [shown]) for call in stage.calls] == [(False, True)] * 2
    (sample,) = (await rollout.close())["samples"]
    assert_whole(sample)
