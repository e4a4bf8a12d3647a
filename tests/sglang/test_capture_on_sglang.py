"""Samples of the base generator against the real SGLang: their tokens, fed back, have their logprobs."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forebay.engines.capture.checking import check
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.chat_over_generate import as_chat, generate_body, rendered
from forebay.engines.chat_template import load_template
from forebay.generators.base import BaseGenerator
from tests.generators.conftest import FakeBuffer
from tests.sglang.conftest import engine_with

pytestmark = pytest.mark.sglang

EXACT = 1e-4
END_ID = 2
"""<|im_end|> of the model that make_model.py makes."""
PARAMS = {"temperature": 1.0, "max_tokens": 12}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(params=["sglang_url", "sglang_router_url"])
def url(request: pytest.FixtureRequest) -> str:
    """Once directly, once behind the router."""
    return str(request.getfixturevalue(request.param))


async def rolled_out(url: str, buffer: FakeBuffer, tmp_path: Path, rollout: Any, num: int = 4) -> list[dict[str, Any]]:
    buffer.plan["group_size"] = num
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "what is 1 + 2?"}')
    generator = BaseGenerator(url, buffer.url, num, num_process=16, sampling_params=PARAMS, max_attempts=1)
    await generator.run_async(rows, rollout, reward)
    assert [sample.get("error") for sample in buffer.samples] == [None] * len(buffer.samples)
    return buffer.samples


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def single(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """It asks for nothing but an answer."""
    reply = await client.chat.completions.create(model="tiny", messages=messages, **params)
    return [*messages, reply.choices[0].message], reply.choices[0].finish_reason


async def with_tools(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """Three turns; the answers of the tools are random, and often enough the model's are no text."""
    chance = random.Random(client.rollout.uid)
    for _ in range(3):
        budget = params | {"max_tokens": chance.randint(1, 12)}
        reply = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, **budget)
        answer = "".join(chance.choices("0123 éß", k=chance.randint(0, 9)))
        tool = {"role": "tool", "tool_call_id": "1", "content": answer}
        messages = [*messages, reply.choices[0].message, tool]
    return messages[:-1], reply.choices[0].finish_reason


async def streaming(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    text = ""
    async for chunk in await client.chat.completions.create(model="tiny", messages=messages, stream=True, **params):
        assert chunk.usage is None
        text += chunk.choices[0].delta.content or ""
    return [*messages, {"role": "assistant", "content": text}], "stop"


def streaming_in_a_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """It stops reading after a few tokens, and goes on."""
    for limit in (4, 99):
        text = ""
        with client.chat.completions.create(model="tiny", messages=messages, stream=True, **params) as stream:
            for number, chunk in enumerate(stream):
                text += chunk.choices[0].delta.content or ""
                if number == limit:
                    break
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    return messages[:-1], "stop"


@pytest.mark.parametrize("rollout", [single, with_tools, streaming, streaming_in_a_thread])
async def test_tokens_fed_back_have_the_recorded_logprobs(
    url: str, sglang_url: str, buffer: FakeBuffer, tmp_path: Path, rollout: Any
) -> None:
    for sample in await rolled_out(url, buffer, tmp_path, rollout):
        checked = await check(sglang_url, sample)
        assert checked.num_tokens > 0
        assert checked.max_delta <= EXACT
        spans = sample["token_spans"]
        assert spans[0]["start"] == 0
        assert spans[-1]["end"] == len(sample["tokens"])


async def test_the_end_token_of_a_stream_is_trained_on(sglang_url: str, buffer: FakeBuffer, tmp_path: Path) -> None:
    """It has no text, and a stream tells no logprob for it."""

    async def ending(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await streaming(client, messages, params | {"max_tokens": 500})

    samples = await rolled_out(sglang_url, buffer, tmp_path, ending, num=8)
    ended = [sample for sample in samples if sample["tokens"][-1] == END_ID]
    assert ended
    for sample in ended:
        assert sample["loss_mask"][-1] == 1
        assert (await check(sglang_url, sample)).max_delta <= EXACT


async def test_200_rollouts_with_random_tools_have_no_unexplained_drift(
    sglang_router_url: str, sglang_url: str, buffer: FakeBuffer, tmp_path: Path
) -> None:
    recorded: list[Trajectory] = []

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        result = await with_tools(client, messages, params)
        recorded.append(client.rollout.recorded)
        return result

    samples = await rolled_out(sglang_router_url, buffer, tmp_path, rollout, num=200)
    assert len(recorded) == 200
    total: Counter[str] = Counter()
    for trajectory in recorded:
        counters = trajectory.counters
        assert counters["clean"] + counters["realigned"] + counters["forked"] == 3
        assert len(trajectory.samples()) == 1 + counters["forked"]
        again = Trajectory()
        for turn in trajectory.turns():
            again.add(turn)
        assert again.samples() == trajectory.samples()
        total += counters
    assert total["clean"] > 200, "no turn but the first ones went on cleanly: the test shows little"
    assert min(total["realigned"], total["forked"]) > 0, total
    assert len(samples) == 200 + total["forked"]
    for sample in random.Random(1).sample(samples, 40):
        assert (await check(sglang_url, sample)).max_delta <= EXACT


async def test_a_prompt_rendered_here_is_the_engines_own(
    sglang_router_url: str, sglang_url: str, sglang_model: Path
) -> None:
    """For routers whose workers cannot be reached: over the router's /generate."""
    messages = [{"role": "user", "content": "what is 1 + 2?"}, {"role": "assistant", "content": "3"}]
    messages.append({"role": "user", "content": "and é?"})
    params = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    body = {"model": "tiny", "messages": messages, **params, "n": 2}
    template = load_template(sglang_model)
    prompt_ids = rendered(body, template)
    assert prompt_ids is not None
    async with httpx.AsyncClient(timeout=60) as http:
        reply = await http.post(f"{sglang_router_url}/generate", json=generate_body(body, prompt_ids))
        asked = {"model": "tiny", "messages": messages, "return_token_ids": True}
        chat = (await http.post(f"{sglang_url}/v1/chat/completions", json=asked)).json()
    turns = turns_of_chat(
        {"messages": messages}, msgspec.json.decode(as_chat(reply.content, body, prompt_ids, template))
    )
    assert [turn.prompt_ids for turn in turns] == [chat["choices"][0]["prompt_token_ids"]] * 2
    for turn in turns:
        trajectory = Trajectory()
        trajectory.add(turn)
        checked = await check(sglang_url, trajectory.samples()[0].fields())
        assert checked.num_tokens + checked.num_unknown == 8
        assert checked.max_delta <= EXACT


async def test_a_rollout_stays_with_one_of_two_workers(
    sglang_python: str, sglang_model: Path, sglang_url: str, buffer: FakeBuffer, tmp_path: Path
) -> None:
    recorded: list[Trajectory] = []

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        result = await with_tools(client, messages, params)
        recorded.append(client.rollout.recorded)
        return result

    with engine_with(sglang_python, sglang_model, tmp_path / "engine.log") as other_url:
        await rolled_out(f"{sglang_url},{other_url}", buffer, tmp_path, rollout, num=8)
    urls = [{turn.engine_url for turn in trajectory.turns()} for trajectory in recorded]
    assert all(len(own) == 1 for own in urls)
    assert set.union(*urls) == {sglang_url, other_url}
