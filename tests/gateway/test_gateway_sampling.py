"""What the gateway's records say of logprobs: none is lost with a stream, and each segment says how it was sampled."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from forebay.client.tensors import collate
from forebay.engines.capture.checking import check
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.gateway.gateway_kit import USER, GatewayAt, Json, OpenedAt, assert_whole, eventually, gateway_before

SYSTEM = {"role": "system", "content": "You add."}


async def streamed(rollout: OpenedAt, *messages: Json, **fields: Any) -> str:
    """As an agent asks that says nothing of a temperature."""
    async with rollout.client() as client:
        stream: Any = await client.chat.completions.create(
            model="any",
            messages=list(messages or [USER]),  # type: ignore[arg-type] # plain dicts
            stream=True,
            **fields,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def told(sample: Json) -> list[Any]:
    return [span.get("sampling") for span in sample["token_spans"] if span["source"] == "llm"]


async def test_a_streamed_answer_of_nothing_but_an_end_token_costs_no_logprob() -> None:
    def script(call: ScriptedCall) -> Reply:
        return Reply(text="hm") if call.prompt == "2+2?" else Reply()

    async with ScriptedEngine(script, has_parsers=False) as engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        answer = {"role": "assistant", "content": await streamed(rollout)}
        assert await streamed(rollout, USER, answer, {"role": "user", "content": "and?"}) == ""
        (sample,) = (await rollout.close())["samples"]
        assert_whole(sample)
        out = collate([sample], 0)
        assert not out["logprobs"].isnan().any()
        assert sample["loss_mask"][-1] == 1
        checked = await check(engine.url, sample)
        assert (checked.num_tokens, checked.max_delta < 1e-9) == (4, True)


async def test_an_end_token_of_which_the_temperature_is_not_known_is_not_trained_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(call: ScriptedCall) -> Reply:
        return Reply(text="hm") if call.prompt == "2+2?" else Reply()

    engine = ScriptedEngine(script, has_parsers=False)
    engine.started_with["sampling_defaults"] = "model"
    async with engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        answer = {"role": "assistant", "content": await streamed(rollout)}
        await streamed(rollout, USER, answer, {"role": "user", "content": "and?"})
        record = await rollout.close()
    (sample,) = record["samples"]
    assert sample["loss_mask"][-1] == 0
    assert sum(sample["loss_mask"]) == 3
    assert len(sample["logprobs"]) == len(sample["tokens"])
    assert not collate([sample], 0)["logprobs"].isnan().any()
    assert record["counters"]["unscored_tokens"] == 1
    assert "have no logprobs" in caplog.text


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_each_segment_says_how_it_was_sampled_and_the_log_says_it_once(
    is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(rollout: OpenedAt, *messages: Json, **fields: Any) -> None:
        await (streamed(rollout, *messages, **fields) if is_stream else rollout.chat(*messages, **fields))

    more = [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and?"}]
    async with ScriptedEngine(lambda _: "4") as engine, gateway_before(engine.url) as gateway:
        with caplog.at_level(logging.WARNING):
            one, other = await gateway.open("one"), await gateway.open("other", sampling_params={"top_p": 0.5})
            await ask(one)
            await ask(one, *more, response_format={"type": "json_object"})
            await ask(other)
            (first,), (second,) = [(await rollout.close())["samples"] for rollout in (one, other)]
    assert told(first) == [{}, {"grammar": "response_format"}]
    assert told(second) == [{"top_p": 0.5}], "a default of the rollout counts as if the agent had sent it"
    kept = collate([first], 0, only_policy_logprobs=True)["loss_mask"].sum().item()
    assert kept == len("4") + 1
    assert len([record for record in caplog.records if "not all the policy's" in record.message]) == 1


async def test_an_answer_that_is_gone_on_with_keeps_how_it_was_sampled() -> None:
    def script(call: ScriptedCall) -> Reply:
        return Reply(text="two") if call.said else Reply(text="one ", finish_reason="abort")

    async with ScriptedEngine(script) as engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        await rollout.chat(temperature=0.8)
        (sample,) = (await rollout.close())["samples"]
    assert told(sample) == [{"temperature": 0.8}]


async def test_a_sample_of_a_captured_generator_says_it_too() -> None:
    async with ScriptedEngine(lambda _: "4") as engine, gateway_before(engine.url) as gateway:
        run_id = "run-captured00000"
        capturing = {"secret": "secret", "group_deadline_s": 60}
        await gateway.register(engine.url, run_id=run_id, key="captured", capturing=capturing)
        url = f"{gateway.url}/gateway/secret"
        body = {"model": "m", "messages": [USER], "temperature": 0.3}
        reply = await gateway.http.post(f"{url}/v1/chat/completions", json=body)
        message = {"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]}
        sample = {"uid": "u", "instance_id": "a", "reward": 1.0, "messages": [USER, message]}
        (await gateway.http.post(f"{url}/buffer/write", json=sample)).raise_for_status()
        assert told(gateway.buffer.written[-1]) == [{"temperature": 0.3}]


async def test_the_protocols_of_other_agents_are_recorded_alike() -> None:
    async with ScriptedEngine(lambda _: "4") as engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        asked = {"model": "any", "max_tokens": 9, "messages": [USER], "top_k": 5, "temperature": 0.2}
        headers = {"x-api-key": rollout.key}
        url = f"{rollout.anthropic_url}/v1/messages"
        (await gateway.http.post(url, json=asked, headers=headers)).raise_for_status()
        (sample,) = (await rollout.close())["samples"]
    assert told(sample) == [{"temperature": 0.2, "top_k": 5}]


async def test_an_engine_that_came_back_is_asked_again_what_it_takes() -> None:
    """Whoever answers at its address next may have been started otherwise."""
    engine = ScriptedEngine(lambda _: "4")
    async with gateway_before(f"http://127.0.0.1:{await free(engine)}") as gateway, asyncio.timeout(30):
        async with engine:
            first = await sample_of(gateway, "one")
        engine.started_with["sampling_defaults"] = "model"
        rollout = await gateway.open("two")
        waiting = asyncio.create_task(rollout.chat())
        await eventually(lambda: any(report.get("waiting_for_engine") for report in gateway.buffer.reports))
        async with engine:
            await waiting
            (second,) = (await rollout.close())["samples"]
    assert told(first) == [{}]
    assert told(second)[0]["temperature"] is None


async def free(engine: ScriptedEngine) -> int:
    """The port that the engine will have."""
    async with engine:
        return httpx.URL(engine.url).port or 0


async def sample_of(gateway: GatewayAt, name: str) -> Json:
    rollout = await gateway.open(name)
    await rollout.chat()
    (sample,) = (await rollout.close())["samples"]
    told_: Json = sample
    return told_
