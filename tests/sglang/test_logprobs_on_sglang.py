"""What the real SGLang's logprobs are under sampling parameters, and that a stream without a text keeps its own."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.client.tensors import collate
from forebay.engines.capture.checking import check
from forebay.generators.base import BaseGenerator
from forebay.web.serving import serve_app
from tests.generators.conftest import FakeBuffer

pytestmark = pytest.mark.sglang

EXACT = 1e-4
PROMPT = [65, 66, 67]
NUM_TOKENS = 4
VOCABULARY = 512
"""Tokens of the model that make_model.py makes; SGLang dies of more top logprobs than that."""
BIASED = 70
Logprobs = dict[int, float]


@pytest.fixture
async def buffer() -> AsyncIterator[FakeBuffer]:
    fake = FakeBuffer()
    async with serve_app(fake.app()) as port:
        fake.url = f"http://127.0.0.1:{port}/w/key"
        yield fake


async def generate(url: str, ids: list[int], num_tokens: int, **params: Any) -> Any:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True, **params},
        "return_logprob": True,
        "top_logprobs_num": VOCABULARY,
    }
    async with httpx.AsyncClient(timeout=60) as http:
        reply = await http.post(f"{url}/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["meta_info"]


async def policy(url: str, ids: list[int]) -> Logprobs:
    """The whole distribution after these tokens, as the model has it."""
    (top,) = (await generate(url, ids, 1))["output_top_logprobs"]
    return {token: value for value, token, _ in top}


Logit = Callable[[int, float, list[int]], float]
"""A token's logit from that of the policy, and the tokens that were sampled before."""


def same(_: int, value: float, __: list[int]) -> float:
    return value


def halved(_: int, value: float, __: list[int]) -> float:
    return value / 0.5


def less_for_each(token: int, value: float, said: list[int]) -> float:
    return value - 2.0 * said.count(token)


def less_at_all(token: int, value: float, said: list[int]) -> float:
    return value - 2.0 * (token in said)


def biased(token: int, value: float, _: list[int]) -> float:
    return value + 5.0 * (token == BIASED)


@pytest.mark.parametrize(
    ("params", "logit"),
    [
        ({}, same),
        ({"temperature": 0.5}, halved),
        ({"temperature": 0.0}, same),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.01}, same),
        ({"frequency_penalty": 2.0}, less_for_each),
        ({"presence_penalty": 2.0}, less_at_all),
        ({"logit_bias": {str(BIASED): 5.0}}, biased),
    ],
)
async def test_its_logprobs_are_those_after_the_temperature_and_everything_but_truncation(
    sglang_url: str, params: dict[str, Any], logit: Logit
) -> None:
    told = (await generate(sglang_url, PROMPT, NUM_TOKENS, **params))["output_token_logprobs"]
    ids = [token for _, token, _ in told]
    differences = []
    for at, (value, token, _) in enumerate(told):
        plain = await policy(sglang_url, PROMPT + ids[:at])
        # It prepares a step while the one before still runs: penalties may not know the newest token yet.
        expected = [logprob(plain, token, ids[:known], logit) for known in (at, max(at - 1, 0))]
        assert min(abs(value - each) for each in expected) <= EXACT
        differences.append(abs(value - plain[token]))
    assert (max(differences) > EXACT) is (logit is not same)


def logprob(plain: Logprobs, token: int, said: list[int], logit: Logit) -> float:
    logits = {each: logit(each, value, said) for each, value in plain.items()}
    return logits[token] - math.log(sum(map(math.exp, logits.values())))


async def test_under_a_grammar_its_logprobs_are_those_of_what_it_allows(sglang_url: str) -> None:
    told = (await generate(sglang_url, PROMPT, NUM_TOKENS, regex="[0-9]+"))["output_token_logprobs"]
    ids = [token for _, token, _ in told]
    for at, (value, token, _) in enumerate(told):
        assert value > (await policy(sglang_url, PROMPT + ids[:at]))[token] + 0.01


async def test_a_stream_of_nothing_but_an_end_token_keeps_its_logprob_and_says_how_it_was_sampled(
    sglang_url: str, buffer: FakeBuffer, tmp_path: Path
) -> None:
    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        ask = client.chat.completions.create
        # Whatever it samples ends the answer, and is no text of it.
        ended = {"stop_token_ids": list(range(VOCABULARY))}
        async for chunk in await ask(model="tiny", messages=messages, stream=True, extra_body=ended):
            assert not chunk.choices[0].delta.content
        messages = [*messages, {"role": "assistant", "content": ""}, {"role": "user", "content": "and?"}]
        reply = await ask(
            model="tiny", messages=messages, temperature=0.5, max_tokens=4, extra_body={"ignore_eos": True}
        )
        return [*messages, reply.choices[0].message], "stop"

    async def reward(item: dict[str, Any]) -> float:
        return 1.0

    buffer.plan["group_size"] = 1
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "what is 1 + 2?"}')
    generator = BaseGenerator(sglang_url, buffer.url, 1, max_attempts=1)
    async with asyncio.timeout(60):
        await generator.run_async(rows, rollout, reward)
    spans = [span for sample in buffer.samples for span in sample["token_spans"] if span["source"] == "llm"]
    assert [(span["end"] - span["start"], span["sampling"]) for span in spans] == [(1, {}), (4, {"temperature": 0.5})]
    out = collate(buffer.samples, 0)
    assert not out["logprobs"].isnan().any()
    assert out["loss_mask"].sum() == 5
    kept = collate(buffer.samples, 0, only_policy_logprobs=True)
    assert kept["loss_mask"].sum() == 1
    for sample, mask in zip(buffer.samples, kept["loss_mask"].int().tolist(), strict=True):
        checked = await check(sglang_url, {**sample, "loss_mask": mask[: len(sample["tokens"])]})
        assert checked.max_delta <= EXACT
