"""Turns that the engine aborts go on from the tokens that were sampled."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, decode, encode, encode_chat
from forebay.generators.base import query_single_turn, single_turn
from forebay.web.serving import serve_app
from tests.generators.partial_kit import (
    PROMPT,
    PROMPT_IDS,
    Json,
    Tokens,
    check_tokens,
    run_rows,
    sample_of,
    samples_of,
    saying,
)

NUM_ABORTED_TURNS = 40


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_an_aborted_turn_goes_on_from_its_tokens(buffer, write_rows, rollout: Any) -> None:
    sample, bodies = await sample_of(saying("one two three", [4, 8]), buffer, write_rows, rollout)
    check_tokens(sample, [*encode("one two three"), TURN_END])
    held = [None, PROMPT_IDS + encode("one "), PROMPT_IDS + encode("one two ")]
    assert [body.get("input_ids") for body in bodies] == held
    assert [body["max_tokens"] for body in bodies] == [64, 60, 56]
    assert [body["messages"] for body in bodies] == [PROMPT] * 3
    assert sample["messages"] == [*PROMPT, {"role": "assistant", "content": "one two three"}]
    assert sample["extra_info"]["finish_reason"] == "stop"
    (segments,) = sample["extra_info"]["segments"]
    assert (segments["texts"], segments["completion_tokens"]) == (["one ", "two ", "three"], [4, 4, 6])


async def test_without_token_ids_it_goes_on_from_the_text(buffer, write_rows) -> None:
    sample, bodies = await sample_of(saying("one two", [4]), buffer, write_rows, capture=False)
    assert bodies[1]["messages"] == [*PROMPT, {"role": "assistant", "content": "one "}]
    assert (bodies[1]["continue_final_message"], bodies[1]["max_tokens"]) == (True, 60)
    assert "input_ids" not in bodies[1]
    assert "tokens" not in sample
    assert sample["messages"][-1]["content"] == "one two"
    (segments,) = sample["extra_info"]["segments"]
    assert (segments["texts"], segments["completion_tokens"]) == (["one ", "two"], [4, 4])


async def test_an_engine_that_looks_over_the_token_ids_is_given_the_text() -> None:
    bodies: list[Json] = []

    async def chat(request: Request) -> Response:
        bodies.append(await request.json())
        is_first, is_text = len(bodies) == 1, bool(bodies[-1].get("continue_final_message"))
        said = "one " if is_first else "two" if is_text else "anew"
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "prompt_token_ids": [1, 2]}
        told = {"response_token_ids": [3], "finish_reason": "abort" if is_first else "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "choices": [choice | told]})

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    async with serve_app(app) as port, AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        messages, finish_reason = await single_turn(client, PROMPT, {"max_tokens": 9})
    assert (messages[-1]["content"], finish_reason) == ("one two", "stop")
    assert [body.get("input_ids") for body in bodies] == [None, [1, 2, 3], None]
    assert bodies[2]["messages"][-1] == {"role": "assistant", "content": "one "}


async def test_the_budget_is_that_of_all_parts_together(buffer, write_rows) -> None:
    sample, bodies = await sample_of(saying("0123456789", [3, 6]), buffer, write_rows, max_tokens=8)
    check_tokens(sample, encode("01234567"))
    assert [body["max_tokens"] for body in bodies] == [8, 5, 2]
    assert sample["extra_info"]["finish_reason"] == "length"


async def test_an_abort_that_leaves_nothing_of_the_budget_ends_the_turn(buffer, write_rows) -> None:
    sample, bodies = await sample_of(saying("0123456789", [6]), buffer, write_rows, max_tokens=6)
    check_tokens(sample, encode("012345"))
    assert len(bodies) == 1
    assert sample["extra_info"]["finish_reason"] == "length"


async def test_an_abort_before_the_first_token_asks_again(buffer, write_rows) -> None:
    def answer(call: ScriptedCall) -> Reply:
        return Reply(finish_reason="abort") if call.number < 2 else Reply(text="x")

    sample, bodies = await sample_of(answer, buffer, write_rows)
    check_tokens(sample, [*encode("x"), TURN_END])
    assert [body["max_tokens"] for body in bodies] == [64, 64, 64]


async def test_a_character_across_a_cut_is_one_character(buffer, write_rows) -> None:
    text = "5 € und 7 €"
    sample, _ = await sample_of(saying(text, [3, len(text.encode()) - 2]), buffer, write_rows)
    check_tokens(sample, [*encode(text), TURN_END])
    assert sample["messages"][-1]["content"] == text


async def test_a_stop_string_across_a_cut_ends_the_turn_there(buffer, write_rows) -> None:
    params = {"stop": ["END"]}
    sample, bodies = await sample_of(saying("so END of it", [4]), buffer, write_rows, sampling_params=params)
    assert len(bodies) == 2
    check_tokens(sample, encode("so END"))
    assert sample["messages"][-1]["content"] == "so "
    assert sample["extra_info"]["finish_reason"] == "stop"


async def test_a_tool_call_across_a_cut_is_parsed_from_both_parts(buffer, write_rows) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await single_turn(client, messages, params, tools)

    def answer(call: ScriptedCall) -> Reply:
        return Reply(text=text[:20], finish_reason="abort") if not call.said else Reply(text=text[len(call.said) :])

    sample, bodies = await sample_of(answer, buffer, write_rows, rollout, max_tokens=200)
    assert bodies[1]["tools"] == tools
    (call,) = sample["messages"][-1]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert sample["messages"][-1]["content"] == ""
    assert sample["extra_info"]["finish_reason"] == "tool_calls"


async def test_reasoning_across_a_cut_is_told_apart_from_what_is_said(buffer, write_rows) -> None:
    thinking = Reply(text="4", reasoning="two and two")
    ids = thinking.tokens()
    sample, _ = await sample_of(saying(decode(ids[:-1]), [12]), buffer, write_rows)
    check_tokens(sample, ids)
    assert sample["messages"][-1] == {"role": "assistant", "content": "4", "reasoning_content": "two and two"}


async def test_a_reply_held_to_a_grammar_is_asked_for_afresh(buffer, write_rows) -> None:
    params = {"response_format": {"type": "json_object"}}

    def answer(call: ScriptedCall) -> Reply:
        return Reply(text='{"a": ', finish_reason="abort") if call.number == 0 else Reply(text='{"a": 1}')

    sample, bodies = await sample_of(answer, buffer, write_rows, sampling_params=params)
    check_tokens(sample, [*encode('{"a": 1}'), TURN_END])
    assert "input_ids" not in bodies[1]
    assert bodies[1]["max_tokens"] == 64
    assert sample["extra_info"]["capture"]["aborted_tokens"] == 6


async def test_each_of_several_choices_is_gone_on_with(buffer, write_rows) -> None:
    bodies, samples = await samples_of(saying("one two", [4]), buffer, write_rows, sampling_params={"n": 2})
    for sample in samples:
        check_tokens(sample, [*encode("one two"), TURN_END])
    assert [body.get("n") for body in bodies] == [2, 2, 1, 1]  # the first two are choices of one call


async def test_any_client_of_the_openai_package_goes_on_as_well() -> None:
    async with ScriptedEngine(saying("one two", [4])) as engine:
        client = AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none")
        asking = {"max_tokens": 64, "return_token_ids": True, "logprobs": True}
        messages, finish_reason = await single_turn(client, PROMPT, asking)
        await client.close()
    assert (messages[-1]["content"], finish_reason) == ("one two", "stop")
    assert engine.calls[1].body["input_ids"] == PROMPT_IDS + encode("one ")


async def test_turns_aborted_at_random_moments_have_every_token_once(buffer, write_rows) -> None:
    """No gap, no overlap, the budget kept, and the engine idle at the end."""
    text = "".join(random.choice("abc €ü,.") for _ in range(50))
    ids = [*encode(text), TURN_END]
    rows = [random_row(number, len(ids)) for number in range(NUM_ABORTED_TURNS)]
    buffer.plan |= {"group_size": 1}

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await single_turn(client, messages, {**params, "max_tokens": client.rollout.row["budget"]})

    async with ScriptedEngine(stopping_at_cuts(ids, rows)) as engine, httpx.AsyncClient(timeout=30) as http:
        aborting = asyncio.create_task(abort_whoever_waits(http, engine))
        await run_rows(buffer, write_rows, engine, rows, rollout)
        aborting.cancel()
        loads = (await http.get(f"{engine.url}/v1/loads")).json()["loads"]
    assert loads[0]["num_running_reqs"] == 0
    assert len(engine.calls) == sum(1 + len(row["cuts"]) for row in rows)
    assert len(buffer.samples) == NUM_ABORTED_TURNS
    for sample in buffer.samples:
        budget = sample["extra_info"]["budget"]
        check_tokens(sample, ids[:budget], encode_chat(sample["messages"][:1]))
        assert sample["extra_info"]["finish_reason"] == ("stop" if budget >= len(ids) else "length")
        if budget >= len(ids):
            assert sample["messages"][-1]["content"] == text


def random_row(number: int, num_ids: int) -> Json:
    """A row with a budget, and the positions below it at which its turn is aborted."""
    budget = random.randint(num_ids // 2, num_ids + 10)
    cuts = sorted(random.sample(range(min(budget, num_ids)), random.randint(1, 3)))
    return {"instance_id": number, "prompt": f"{number:03}", "budget": budget, "cuts": cuts}


def stopping_at_cuts(ids: list[int], rows: list[Json]) -> Callable[[ScriptedCall], Reply]:
    """Says ``ids`` to all; a call in which a cut lies waits there until it is aborted."""
    left = {row["prompt"]: list(row["cuts"]) for row in rows}

    def answer(call: ScriptedCall) -> Reply:
        done, cuts = len(call.prompt_ids) - len(encode_chat(call.messages[:1])), left[call.prompt]
        cut = cuts.pop(0) if cuts else None
        said = ids[done:cut]
        return Tokens(ids=said, text=decode(said), hang=cut is not None)

    return answer


async def abort_whoever_waits(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """Abort each call that has come to its cut."""
    while True:
        await asyncio.sleep(0.005)
        for call in [call for call in engine.calls if call.finished is None and call.reply.hang]:
            if len(call.sampled_ids) == len(call.reply.tokens()):
                await http.post(f"{engine.url}/abort_request", json={"rid": call.rid})
