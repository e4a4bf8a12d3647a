"""Agents that drop the model's reasoning: with ``restore_reasoning`` their turns are one sample all the same."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forebay.engines.scripted import Reply, ScriptedCall, tokens
from tests.gateway.conftest import Stage
from tests.gateway.forgetful_agents import AGENTS, NAME, STREAMING, openai_chat
from tests.gateway.gateway_kit import USER, Json, OpenedAt, assert_whole, gateway_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TURNS = 10
OFF = {"key": "off-key", "run_id": "run-off000000000"}


def seek(call: ScriptedCall) -> Reply:
    """Think, say something and call the tool, differently in every turn."""
    turn = sum(message["role"] == "assistant" for message in call.messages)
    function = {"name": NAME, "arguments": "{}"}
    calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
    return Reply(reasoning=f"thought {turn}", text=f"step {turn}", tool_calls=calls)


class ThinkingStage(Stage):
    """An engine whose template keeps the reasoning."""

    def __init__(self) -> None:
        super().__init__()
        self.engine._backend.encode_chat = keep_reasoning  # type: ignore[method-assign]


async def keep_reasoning(messages: Any, tools: Any, *, is_continued: bool) -> list[int]:
    """Render a prompt with the reasoning of earlier turns as it was sampled."""
    thoughts = [Reply(reasoning=message.get("reasoning_content") or "").thought for message in messages]
    said = [tokens._content(message) for message in messages]
    shown = [{**m, "content": a + b, "tool_calls": []} for m, a, b in zip(messages, thoughts, said, strict=True)]
    return tokens.encode_chat(shown, tools, is_continued=is_continued)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[ThinkingStage]:
    """One run that restores reasoning, and one that does not."""
    stage = ThinkingStage()
    async with stage.engine, gateway_before(stage.engine.url, restore_reasoning=True) as stage.gateway:
        await stage.gateway.register(stage.engine.url, **OFF)
        yield stage


async def close(rollout: OpenedAt, key: str) -> Json:
    return await rollout.gateway.control("POST", f"rollouts/{rollout.rollout_id}/close", key=key)


def counts(told: Json) -> Json:
    return {name: number for name, number in told["counters"].items() if number}


@pytest.mark.parametrize("name", AGENTS | STREAMING)
async def test_turns_of_an_agent_that_drops_reasoning_are_one_sample(stage: ThinkingStage, name: str) -> None:
    agent = (AGENTS | STREAMING)[name]
    stage(seek)
    rollout = await stage.open()
    await agent(rollout, NUM_TURNS)
    told = await rollout.close()
    (sample,) = told["samples"]
    assert_whole(sample)
    assert counts(told) == {"clean": NUM_TURNS, "restored": NUM_TURNS - 1}
    said = [message for message in sample["messages"] if message["role"] == "assistant"]
    assert [message["reasoning_content"] for message in said] == [f"thought {turn}" for turn in range(NUM_TURNS)]

    rollout = await stage.gateway.open(f"off-{name}", key=OFF["key"])
    await agent(rollout, NUM_TURNS)
    told = await close(rollout, OFF["key"])
    assert (len(told["samples"]), counts(told)) == (NUM_TURNS, {"clean": 1, "forked": NUM_TURNS - 1})


async def test_a_message_that_the_agent_edits_stays_as_it_is(stage: ThinkingStage) -> None:
    stage(seek)
    rollout = await stage.open()
    await openai_chat(rollout, NUM_TURNS, edit=lambda text: text.removesuffix("!") + "!")
    told = await rollout.close()
    assert len(told["samples"]) == NUM_TURNS
    assert counts(told) == {"clean": 1, "forked": NUM_TURNS - 1, "unrestored": NUM_TURNS - 1}


def answer(text: str) -> Json:
    return {"role": "assistant", "content": text}


def ask(text: str) -> Json:
    return {"role": "user", "content": text}


def thoughts(call: ScriptedCall) -> list[Any]:
    """The reasoning of each message of the assistant that the engine was given."""
    return [message.get("reasoning_content") for message in call.messages if message["role"] == "assistant"]


async def test_equal_answers_get_each_its_own_reasoning_and_an_example_of_the_agent_none(stage: ThinkingStage) -> None:
    stage(lambda call: Reply(reasoning=f"about {call.prompt}", text="ok"))
    rollout = await stage.open()
    messages = [ask("example"), answer("ok")]
    for text in ("one", "two", "three"):
        await rollout.chat(*messages, ask(text))
        messages += [ask(text), answer("ok")]
    assert thoughts(stage.calls[-1]) == [None, "about one", "about two"]
    told = await rollout.close()
    assert len(told["samples"]) == 1
    assert counts(told) == {"clean": 3, "restored": 2, "unrestored": 1}


async def test_a_history_that_is_cut_short_gets_its_reasoning_and_a_message_with_reasoning_keeps_it(
    stage: ThinkingStage,
) -> None:
    stage(lambda call: Reply(reasoning=f"about {call.prompt}", text=f"said {call.prompt}"))
    rollout = await stage.open()
    await rollout.chat(ask("one"))
    await rollout.chat(ask("one"), answer("said one"), ask("two"))
    own = {**answer("said one"), "reasoning_content": "my own"}
    await rollout.chat(ask("compacted"), own, ask("then"), answer(" said two\n"), ask("three"))
    assert thoughts(stage.calls[-1]) == ["my own", "about two"]


@pytest.mark.parametrize("is_left_out", [True, False])
async def test_calls_to_other_models_and_calls_that_are_not_recorded_are_sent_as_they_are(
    stage: ThinkingStage, is_left_out: bool
) -> None:
    stage(Reply(reasoning="hm", text="4"))
    told = {"key": "policy-key", "run_id": "run-policy000000", "policy_models": ["policy"], "restore_reasoning": True}
    await stage.gateway.register(stage.engine.url, **told)
    rollout = await stage.gateway.open(f"judged-{is_left_out}", key="policy-key")
    asked = [USER, answer("4"), ask("good?")]
    headers = {"X-Forebay-Record": "false"} if is_left_out else {}
    model = "policy" if is_left_out else "judge"
    await rollout.chat(USER, model="policy")
    reply = await rollout.post("chat/completions", {"model": model, "messages": asked}, **headers)
    assert reply.status_code == 200
    assert thoughts(stage.calls[-1]) == [None]
    await rollout.chat(*asked, model="policy")
    assert thoughts(stage.calls[-1]) == ["hm"]
    assert counts(await close(rollout, "policy-key"))["restored"] == 1


async def test_what_is_no_message_is_left_to_the_engine(stage: ThinkingStage) -> None:
    stage("4")
    rollout = await stage.open()
    for messages in (
        3,
        None,
        [7],
        [{"role": "assistant", "tool_calls": 3}],
        [{"role": "assistant", "tool_calls": [3]}],
    ):
        body = {"model": "m", "messages": messages}
        directly = await stage.gateway.http.post(f"{stage.engine.url}/v1/chat/completions", json=body)
        assert (await rollout.post("chat/completions", body)).status_code == directly.status_code
