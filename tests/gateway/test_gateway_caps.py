"""Rollouts with a cap at the gateway, and those whose scheduler has chosen an engine."""

import asyncio
from contextlib import AsyncExitStack

import openai
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.gateway.conftest import Stage, codes_of
from tests.gateway.gateway_kit import USER, eventually, gateway_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAP = 8
ANSWER = "one two three"


async def test_a_call_at_the_cap_ends_the_rollout_and_the_record_says_so(stage: Stage) -> None:
    stage(ANSWER)
    rollout = await stage.open(cap_tokens=CAP)
    replies = [await rollout.post("chat/completions", {"messages": [USER], "max_tokens": 50}) for _ in range(2)]
    assert codes_of(replies) == [(410, "rollout_over")] * 2
    assert "it reached its token cap" in replies[0].json()["error"]["message"]
    assert [call.limit for call in stage.calls] == [CAP]
    told = await rollout.close()
    assert (told["broken_tokens"], told["failures"]) == (CAP, [])


async def test_calls_are_bounded_by_what_those_before_have_left(stage: Stage) -> None:
    stage("12345")
    rollout = await stage.open(cap_tokens=14)
    for _ in range(2):
        await rollout.chat(max_completion_tokens=50)
    reply = await rollout.post("chat/completions", {"messages": [USER]})
    assert reply.status_code == 410
    assert [call.limit for call in stage.calls] == [14, 8, 2]
    assert "max_tokens" not in stage.calls[0].body
    assert (await rollout.close())["broken_tokens"] == 14


async def test_a_call_that_ends_at_its_own_limit_is_an_ordinary_one(stage: Stage) -> None:
    stage(ANSWER)
    rollout = await stage.open(cap_tokens=CAP)
    reply = await rollout.chat(max_tokens=CAP)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert (await rollout.record())["broken_tokens"] is None
    # Nothing is left for another one.
    assert codes_of([await rollout.post("chat/completions", {"messages": [USER]})]) == [(410, "rollout_over")]
    assert len(stage.calls) == 1
    assert (await rollout.close())["broken_tokens"] == CAP


async def test_the_reader_of_a_stream_gets_an_error_in_place_of_its_end(stage: Stage) -> None:
    stage(ANSWER)
    rollout = await stage.open(cap_tokens=CAP)
    stream = await rollout.client().chat.completions.create(model="any", messages=[USER], stream=True)
    reasons: list[str | None] = []

    async def read() -> None:
        async for chunk in stream:
            reasons.extend(choice.finish_reason for choice in chunk.choices)

    with pytest.raises(openai.APIError, match="cap"):
        await read()
    assert set(reasons) == {None}
    assert (await rollout.close())["broken_tokens"] == CAP


async def test_other_calls_of_the_rollout_end_at_their_engine(stage: Stage) -> None:
    def script(call: ScriptedCall) -> Reply | str:
        return Reply(text="slow", hang=True) if call.prompt == "slow" else ANSWER

    stage(script)
    rollout = await stage.open(cap_tokens=CAP)
    slow = asyncio.create_task(rollout.post("chat/completions", {"messages": [{"role": "user", "content": "slow"}]}))
    await stage.busy()
    fast = await rollout.post("chat/completions", {"messages": [USER]})
    assert codes_of([fast, await slow]) == [(410, "rollout_over")] * 2
    await eventually(lambda: stage.calls[0].finished in {"abort", "disconnected"})


async def test_what_goes_on_after_an_abort_is_bounded_too(stage: Stage) -> None:
    def script(call: ScriptedCall) -> Reply | str:
        return ANSWER if call.said else Reply(text="one", hang=True)

    stage(script)
    rollout = await stage.open(cap_tokens=CAP)
    asking = asyncio.create_task(rollout.post("chat/completions", {"messages": [USER]}))
    await eventually(lambda: bool(stage.calls) and len(stage.calls[0].sampled_ids) == 3)
    await stage.abort(stage.calls[0])
    assert codes_of([await asking]) == [(410, "rollout_over")]
    assert [call.limit for call in stage.calls] == [CAP, CAP - 3]
    assert (await rollout.close())["broken_tokens"] == CAP


async def test_a_run_hears_which_of_its_rollouts_were_broken(stage: Stage) -> None:
    stage(ANSWER)
    before = (await stage.gateway.control("GET", "broken?after=1000000"))["last"]
    asking = asyncio.create_task(stage.gateway.control("GET", f"broken?after={before}"))
    rollout = await stage.open(cap_tokens=CAP)
    await rollout.post("chat/completions", {"messages": [USER]})
    assert await asking == {"rollouts": [rollout.rollout_id], "last": before + 1}
    assert (await stage.gateway.ask("GET", "broken?after=x")).status_code == 422
    assert (await stage.gateway.ask("GET", "broken", key="wrong")).status_code == 401


async def test_the_chosen_engine_is_asked_while_it_answers_and_is_not_overloaded() -> None:
    async with AsyncExitStack() as chosen_up, ScriptedEngine(lambda _: "other") as other:
        chosen = await chosen_up.enter_async_context(
            ScriptedEngine(lambda call: Reply(text="busy", hang=True) if call.prompt == "wait" else "chosen")
        )
        async with gateway_before(other.url, chosen.url) as gateway:
            rollouts = [await gateway.open(f"r{n}", engine_url=chosen.url) for n in range(3)]
            for rollout in rollouts:
                assert [await said(rollout) for _ in range(2)] == ["chosen", "chosen"]
            wait = {"messages": [{"role": "user", "content": "wait"}]}
            hung = [asyncio.create_task(rollouts[0].post("chat/completions", wait)) for _ in range(9)]
            await chosen.wait_in_flight(9)
            assert await said(rollouts[1]) == "other"
            await rollouts[0].close()
            await asyncio.gather(*hung)
            await chosen.wait_in_flight(0)
            assert await said(rollouts[1]) == "chosen"
            await chosen_up.aclose()
            assert await said(rollouts[2]) == "other"


async def said(rollout) -> str:
    reply = await rollout.chat()
    return str(reply["choices"][0]["message"]["content"])
