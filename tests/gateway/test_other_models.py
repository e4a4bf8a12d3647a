"""Calls of an agent to other models than its policy, and calls that it wants in no record: over every protocol."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forebay.engines.scripted import ScriptedCall
from forebay.engines.scripted.tokens import decode
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import USER, Json, OpenedAt, assert_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN, KEY = "run-policy00000000", "policy-key"
POLICY, JUDGE = "policy:sql", "frozen-judge-70b"
VERDICT = {"role": "user", "content": "good?"}
OFF = {"X-Forebay-Record": "false"}
PATHS = ["chat/completions", "responses", "messages"]


def script(call: ScriptedCall) -> str:
    return "4" if call.prompt == "2+2?" else "good"


@pytest_asyncio.fixture(loop_scope="module")
async def rollout(stage: Stage, request: pytest.FixtureRequest) -> AsyncIterator[OpenedAt]:
    """Of a run with one adapter for its policy."""
    stage(script)
    names = getattr(request, "param", ["policy", POLICY])
    await stage.gateway.register(stage.engine.url, run_id=RUN, key=KEY, policy_models=names)
    yield await stage.gateway.open("r-policy", key=KEY)
    await stage.gateway.forget(RUN)


async def ask(rollout: OpenedAt, path: str, message: Json, *, stream: bool = False, **fields: Any) -> None:
    """A call of the agent over one protocol; ``headers`` among the ``fields``."""
    headers = fields.pop("headers", {})
    body: Json = {"stream": stream, **fields}
    body |= {"input": [message]} if path == "responses" else {"messages": [message], "max_tokens": 99}
    base = f"{rollout.anthropic_url}/v1" if path == "messages" else rollout.base_url
    headers = {"Authorization": f"Bearer {rollout.key}", **headers}
    reply = await rollout.gateway.http.post(f"{base}/{path}", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert ("4" if message is USER else "good") in reply.text


async def record_of(rollout: OpenedAt) -> Json:
    return await rollout.gateway.control("POST", f"rollouts/{rollout.rollout_id}/close", key=KEY)


def trained(sample: Json) -> str:
    return decode(token for token, bit in zip(sample["tokens"], sample["loss_mask"], strict=True) if bit)


def sampled_by(sample: Json) -> list[tuple[Any, Any]]:
    return [(span.get("model"), span.get("adapter")) for span in sample["token_spans"] if span["source"] == "llm"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_other_models_are_recorded_and_not_trained_on(rollout: OpenedAt, path: str, stream: bool) -> None:
    await ask(rollout, path, USER, model=POLICY, stream=stream)
    await ask(rollout, path, VERDICT, model=JUDGE, stream=stream, temperature=0.2)
    record = await record_of(rollout)
    judged, answer = record["samples"]
    assert_whole(answer)
    assert (trained(answer), sampled_by(answer)) == ("4", [("policy", "sql")])
    assert (set(judged["loss_mask"]), sampled_by(judged)) == ({0}, [(JUDGE, None)])
    assert judged["messages"][-1]["content"] == "good"
    assert record["counters"]["other_models"] == 1
    assert answer["asked_models"] == [POLICY, JUDGE]
    assert "asked_models" not in judged


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_header_leaves_one_call_out_of_the_record(rollout: OpenedAt, path: str, stream: bool) -> None:
    await ask(rollout, path, USER, model="policy", stream=stream)
    await ask(rollout, path, VERDICT, model=JUDGE, stream=stream, headers=OFF)
    record = await record_of(rollout)
    (answer,) = record["samples"]
    assert trained(answer) == "4"
    assert (record["num_calls"], record["notes"]) == (2, {"unrecorded_chats": 1})


async def test_a_turn_of_another_model_inside_the_conversation_is_not_trained_on(rollout: OpenedAt) -> None:
    messages = [USER]
    for model in (JUDGE, "policy", JUDGE):
        answer = await rollout.chat(*messages, model=model)
        messages += [answer["choices"][0]["message"], VERDICT]
    *_, main = (await record_of(rollout))["samples"]
    assert trained(main) == "good"
    assert sampled_by(main) == [(JUDGE, None), ("policy", None)]


@pytest.mark.parametrize("rollout", [None], indirect=True)
async def test_without_the_setting_every_call_is_the_policys(rollout: OpenedAt) -> None:
    await ask(rollout, "chat/completions", USER, model="custom")
    record = await rollout.gateway.control("GET", f"rollouts/{rollout.rollout_id}", key=KEY)
    assert "asked_models" not in record["samples"][-1]
    await ask(rollout, "chat/completions", VERDICT, model="custom", lora_path="other")
    record = await record_of(rollout)
    assert list(map(trained, record["samples"])) == ["4", "good"]
    assert list(map(sampled_by, record["samples"])) == [[("custom", None)], [("custom", "other")]]
    assert record["samples"][-1]["asked_models"] == ["custom", "custom:other"]
    assert "other_models" not in record["counters"]
