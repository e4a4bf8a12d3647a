"""A thinking model on the real SGLang: agents that drop its reasoning get one sample, of the tokens it sampled."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from forebay.engines.capture.checking import check
from tests.gateway.forgetful_agents import AGENTS
from tests.gateway.gateway_kit import GatewayAt, gateway_before
from tests.sglang.conftest import engine_with, make_model

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

NUM_TURNS = 10
EXACT = 1e-4
PARSERS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"]
SAMPLING = {"temperature": 1.0, "max_tokens": 256}


@pytest.fixture(scope="module")
def engine_url(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with a model that thinks and calls a tool in every turn."""
    folder = tmp_path_factory.mktemp("thinking")
    model = make_model(sglang_python, folder, "thinking")
    with engine_with(sglang_python, model, folder / "engine.log", *PARSERS) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engine_url: str) -> AsyncIterator[GatewayAt]:
    async with gateway_before(engine_url, restore_reasoning=True) as gateway:
        gateway.http.timeout = httpx.Timeout(120)
        yield gateway


# Whole answers: a busy SGLang loses the text of a stream that arrives together with the beginning of a call.
@pytest.mark.parametrize("name", AGENTS)
async def test_ten_turns_without_reasoning_are_one_sample(gateway: GatewayAt, engine_url: str, name: str) -> None:
    rollout = await gateway.open(name, deadline_s=120, sampling_params=SAMPLING)
    await AGENTS[name](rollout, NUM_TURNS)
    told = await rollout.close()
    (sample,) = told["samples"]
    assert (told["counters"]["clean"], told["counters"]["restored"]) == (NUM_TURNS, NUM_TURNS - 1)
    checked = await check(engine_url, sample)
    assert checked.num_tokens == sum(sample["loss_mask"]) > NUM_TURNS * 5
    assert checked.max_delta <= EXACT
    # What a client asks that kept the reasoning.
    body = {"model": "tiny", "messages": sample["messages"][:-1], "max_tokens": 1, "return_token_ids": True}
    kept = (await gateway.http.post(f"{engine_url}/v1/chat/completions", json=body)).json()["choices"][0]
    last = sample["token_spans"][-1]
    assert last["source"] == "llm"
    assert kept["prompt_token_ids"] == sample["tokens"][: last["start"]]
