"""The scripted engine's tokens: what is sampled, what its template makes of it, and what time does to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from forebay.engines.scripted import Reply, Script, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, decode, encode, encode_chat, logprob
from tests.kit import TIME_LIMIT_S

ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Was heißt 2 + 2?"}]}
TOLD: dict[str, Any] = {"return_token_ids": True, "logprobs": True}
LIMIT_S = 30.0


def tool_call(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[ScriptedEngine, httpx.AsyncClient]]:
    async with (
        ScriptedEngine(script) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=LIMIT_S) as http,
    ):
        yield engine, http


def official(engine: ScriptedEngine) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none")


async def abort(engine: ScriptedEngine, rid: str) -> None:
    async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
        await http.post(f"{engine.url}/abort_request", json={"rid": rid})


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json=ASK | TOLD | fields)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def next_prompt(choice: dict[str, Any], **answer: Any) -> list[int]:
    """The prompt of the turn after a choice, as a client makes it of the message that it got."""
    message = {name: value for name, value in choice["message"].items() if value is not None}
    return encode_chat([*ASK["messages"], message, {"role": "tool", "content": "4", **answer}])


async def test_tokens_are_the_bytes_of_the_text_and_an_end() -> None:
    async with serving(lambda _: "vier ✓") as (_, http):
        choice = await chat(http)
    assert choice["prompt_token_ids"] == encode("<|im_start|>user\nWas heißt 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert choice["response_token_ids"] == [*"vier ✓".encode(), TURN_END]
    before = [choice["prompt_token_ids"][-1], *choice["response_token_ids"]]
    told = [token["logprob"] for token in choice["logprobs"]["content"]]
    expected = [logprob(a, b, "default") for a, b in zip(before, choice["response_token_ids"], strict=False)]
    assert told == expected


async def test_a_call_of_a_tool_is_sampled_as_text_and_extended_where_the_template_spells_it_so() -> None:
    async with serving(lambda _: Reply(text="So:", tool_calls=[tool_call('{"a": 2}')])) as (_, http):
        choice = await chat(http)
    assert choice["message"]["tool_calls"] == [tool_call('{"a": 2}')]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")
    held = choice["prompt_token_ids"] + choice["response_token_ids"]
    spelled = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert decode(choice["response_token_ids"]) == spelled
    assert next_prompt(choice)[: len(held)] == held


@pytest.mark.parametrize("reply", [Reply(tool_calls=[tool_call('{"a":2}')]), Reply(text="4", reasoning="2 + 2")])
async def test_a_reply_that_the_template_writes_otherwise_drifts(reply: Reply) -> None:
    async with serving(lambda _: reply) as (_, http):
        choice = await chat(http)
    held = choice["prompt_token_ids"] + choice["response_token_ids"]
    assert next_prompt(choice)[: len(held)] != held
    assert choice["message"]["reasoning_content"] == (reply.reasoning or None)


async def test_the_budget_cuts_and_the_rest_is_said_from_the_token_ids() -> None:
    whole = "one two three"
    async with serving(lambda call: whole[len(call.said) :]) as (engine, http):
        first = await chat(http, max_tokens=7)
        held = first["prompt_token_ids"] + first["response_token_ids"]
        rest = await chat(http, input_ids=held)
        assert [call.said for call in engine.calls] == ["", "one two"]
    assert (first["finish_reason"], rest["finish_reason"]) == ("length", "stop")
    assert first["message"]["content"] + rest["message"]["content"] == whole


async def test_an_abort_in_mid_text_keeps_the_tokens_said_so_far() -> None:
    async with serving(lambda _: Reply(text="word " * 1000, tokens_per_s=500)) as (engine, http):
        call = asyncio.create_task(chat(http, rid="cut"))
        await engine.wait_in_flight(1)
        while not engine.calls[0].sampled_ids:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)
        await http.post("/abort_request", json={"rid": "cut"})
        choice = await call
    sampled = choice["response_token_ids"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(sampled) < 5000
    assert decode(sampled) == choice["message"]["content"] == ("word " * 1000)[: len(sampled)]


async def test_a_stream_arrives_while_the_reply_is_being_said() -> None:
    async with ScriptedEngine(lambda _: Reply(text="so far", hang=True)) as engine, official(engine) as client:
        stream = await client.chat.completions.create(**ASK, stream=True, extra_body={"rid": "s"})
        said = ""
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if said == "so far":
                await abort(engine, "s")
            reason = chunk.choices[0].finish_reason
    assert (said, reason) == ("so far", "abort")


async def test_tool_calls_and_reasoning_come_in_their_own_deltas() -> None:
    reply = Reply(text="Hm.", reasoning="2 + 2", tool_calls=[tool_call('{"a": 2}')])
    async with ScriptedEngine(lambda _: reply) as engine, official(engine) as client:
        stream = await client.chat.completions.create(**ASK, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Hm."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "2 + 2"
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert (parts[0].id, parts[0].function.name) == ("c1", "add")
    assert "".join(part.function.arguments or "" for part in parts) == '{"a": 2}'


async def test_a_prompt_that_is_no_open_chat_asks_nobody() -> None:
    async with serving(lambda _: "never") as (engine, http):
        told = (await http.post("/generate", json={"input_ids": [0], "rid": "fb-"})).json()
        assert (told["output_ids"], engine.calls) == ([], [])
        chat_text = decode(encode_chat(ASK["messages"]), with_marks=True)
        told = (await http.post("/generate", json={"text": chat_text})).json()
        assert told["text"] == "never"
        assert engine.calls[0].messages == ASK["messages"]


async def test_new_weights_wait_for_what_runs_unless_paused() -> None:
    new = {"model_path": "somewhere", "weight_version": "2"}
    async with serving(lambda _: Reply(text="so far", hang=True)) as (engine, http):
        call = asyncio.create_task(chat(http, rid="a", return_meta_info=True))
        await engine.wait_in_flight(1)
        update = asyncio.create_task(http.post("/update_weights_from_disk", json=new))
        await http.get("/health")
        assert not update.done()
        assert engine.weight_version == "default"
        await http.post("/abort_request", json={"rid": "a"})
        assert (await update).json()["success"]
        assert (await call)["meta_info"]["weight_version"] == "default"
        assert (engine.weight_version, engine.weight_updates, engine.paused) == ("2", [new], None)


async def test_leaving_ends_what_a_pause_holds() -> None:
    async with serving(lambda _: Reply(hang=True)) as (engine, http):
        running = asyncio.create_task(chat(http))
        await engine.wait_in_flight(1)
        await http.post("/pause_generation", json={"mode": "in_place"})
        assert engine.paused == "in_place"
        held = asyncio.create_task(chat(http))
        await engine.wait_calls(2)
        await engine.__aexit__(None, None, None)
        assert [(await call)["finish_reason"] for call in (running, held)] == ["abort", "abort"]
