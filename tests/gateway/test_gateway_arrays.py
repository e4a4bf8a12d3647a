"""Routed experts through the gateway: each row of a record is the one that the engine used, and is asked for once."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines.arrays_flows import ARRAYS, closed
from tests.engines.moe_engine import MoEEngine, routes_of
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import USER, gateway_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = "routed_experts_start_len"
ENGINES = {"moe": MoEEngine}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def moe() -> AsyncIterator[Stage]:
    """An engine that returns routed experts, and a gateway with a run that asks for them."""
    stage = Stage(MoEEngine)
    async with stage.engine, gateway_before(stage.engine.url, arrays=ARRAYS) as stage.gateway:
        yield stage


@pytest.mark.parametrize("protocol", ["responses", "messages"])
async def test_other_protocols_have_rows(moe: Stage, protocol: str) -> None:
    moe("some words")
    rollout = await moe.open()
    if protocol == "responses":
        reply = await rollout.post("responses", {"model": "m", "input": "go"})
    else:
        body = {"model": "m", "max_tokens": 50, "messages": [USER]}
        headers = {"x-api-key": rollout.key}
        reply = await rollout.gateway.http.post(f"{rollout.anthropic_url}/v1/messages", json=body, headers=headers)
    assert reply.is_success, reply.text
    recorded = await closed(rollout)
    [sample], [rows] = recorded.samples, recorded.routes
    assert rows == dict(enumerate(routes_of(sample["tokens"][:-1], ["default"] * len(sample["tokens"]))))


async def test_the_agent_does_not_get_rows_and_tokens_without_a_mask_are_counted(moe: Stage) -> None:
    moe("some words")
    rollout = await moe.open()
    reply = await rollout.chat(top_k=5, logprobs=True, return_meta_info=True)
    rows = {"routed_experts", "output_token_sampling_mask", "output_top_logprobs_shape"}
    assert not rows & reply["choices"][0]["meta_info"].keys()
    await rollout.chat({"role": "user", "content": "without a mask"}, top_p=0.5)
    recorded = await closed(rollout)
    assert ["sampling_mask" in arrays for arrays in recorded.arrays] == [True, False]
    assert recorded.counters["unmasked_tokens"] == len(moe.calls[-1].sampled_ids)


async def test_a_record_as_json_names_its_parts_without_them(moe: Stage) -> None:
    moe("4")
    rollout = await moe.open()
    await rollout.chat()
    shown, told = await rollout.record(), await rollout.close()
    [sample] = told["samples"]
    assert [len(digest) for digest in sample.pop("parts")] == [32]
    assert "routed_experts" in sample.pop("arrays")
    assert shown["samples"] == [sample]


async def test_a_client_gets_the_refusal_of_its_own_field(stage: Stage) -> None:
    stage("4")
    rollout = await stage.open()
    body = {"model": "m", "messages": [USER], "return_routed_experts": True, ASKED: 5_000}
    reply = await rollout.post("chat/completions", body)
    assert (reply.status_code, ASKED in reply.text) == (400, True)
