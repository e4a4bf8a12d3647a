"""What the real SGLang's logprobs are under sampling parameters, and that a stream without a text keeps its own."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.client.tensors import collate
from forebay.engines.capture import teacher
from forebay.engines.capture.checking import check
from forebay.generators.base import BaseGenerator
from tests.generators.conftest import FakeBuffer

pytestmark = pytest.mark.sglang

EXACT = 1e-4
PROMPT = [65, 66, 67]
NUM_TOKENS = 8
MANY_TOKENS = 64
"""So many that a penalty on those sampled before is seen in the distribution, whichever they are."""
VOCABULARY = 512
"""Tokens of the model that make_model.py makes; SGLang dies of more top logprobs than that."""
BIASED = 70
Logprobs = dict[int, float]


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


Logit = Callable[[int, float], float]
"""A token's logit from its logprob under the policy."""


def same(_: int, value: float) -> float:
    return value


def halved(_: int, value: float) -> float:
    return value / 0.5


def biased(token: int, value: float) -> float:
    return value + 5.0 * (token == BIASED)


@pytest.mark.parametrize(
    ("params", "logit"),
    [
        ({}, same),
        ({"temperature": 0.5}, halved),
        ({"temperature": 0.0}, same),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.01}, same),
        ({"logit_bias": {str(BIASED): 5.0}}, biased),
    ],
)
async def test_its_logprobs_are_those_after_the_temperature_and_everything_but_truncation(
    sglang_url: str, params: dict[str, Any], logit: Logit
) -> None:
    for plain, token, value in await sampled(sglang_url, **params):
        logits = {each: logit(each, of_policy) for each, of_policy in plain.items()}
        total = math.log(sum(map(math.exp, logits.values())))
        assert value == pytest.approx(logits[token] - total, abs=EXACT)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_under_a_penalty_its_logprobs_are_not_the_policys(sglang_url: str, name: str) -> None:
    found = await sampled(sglang_url, MANY_TOKENS, **{name: 2.0})
    assert max(abs(value - plain[token]) for plain, token, value in found) > 10 * EXACT


async def test_under_a_grammar_its_logprobs_are_those_of_what_it_allows(sglang_url: str) -> None:
    # The first alone: after a digit the end token is allowed, and behind that everything.
    plain, token, value = (await sampled(sglang_url, regex="[0-9]+"))[0]
    assert value > plain[token] + 0.01


async def sampled(url: str, num_tokens: int = NUM_TOKENS, **params: Any) -> list[tuple[Logprobs, int, float]]:
    """For each token that is sampled so: the policy's distribution there, the token, and its logprob as it is told."""
    told = (await generate(url, PROMPT, num_tokens, **params))["output_token_logprobs"]
    ids = [token for _, token, _ in told]
    return [(await policy(url, PROMPT + ids[:at]), token, value) for at, (value, token, _) in enumerate(told)]


async def test_a_teacher_returns_the_logprobs_of_a_sample_and_the_most_probable_ids(sglang_url: str) -> None:
    ids = [*PROMPT, BIASED]
    rows = {name: each.data for name, each in (await teacher.arrays(sglang_url, {"tokens": ids}, top_k=3)).items()}
    for at in range(1, len(ids)):
        plain = await policy(sglang_url, ids[:at])
        best = pytest.approx(sorted(plain.values(), reverse=True)[:3], abs=EXACT)
        assert rows["teacher_logprobs"][at - 1] == pytest.approx(plain[ids[at]], abs=EXACT)
        assert rows["teacher_top_logprobs"][at - 1].tolist() == best
        assert [plain[token] for token in rows["teacher_top_ids"][at - 1].tolist()] == best


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
