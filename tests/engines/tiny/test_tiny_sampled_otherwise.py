"""Tokens that a model sampled at another temperature: their logprobs are not its own, and can be left out."""

import asyncio
from pathlib import Path
from typing import Any

from forebay.client.tensors import rows
from forebay.engines.capture.checking import check
from forebay.generators.base import BaseGenerator
from tests.kit import Json
from tests.sglang.partial_kit import fake_buffer

EXACT = 1e-4
NUM_TOKENS = 20


async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    ask = client.chat.completions.create
    asked = {"model": "tiny", "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    reply = await ask(messages=messages, temperature=2.0, **asked)
    messages = [*messages, reply.choices[0].message, {"role": "user", "content": "and 2 + 2?"}]
    reply = await ask(messages=messages, **asked)
    return [*messages, reply.choices[0].message], "stop"


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def largest(engine_url: str, samples: list[Json]) -> float:
    checks = await asyncio.gather(*(check(engine_url, sample) for sample in samples))
    assert sum(each.num_tokens + each.num_unknown for each in checks) > 0
    return max(each.max_delta for each in checks)


async def test_what_is_left_has_the_models_own_logprobs(engine_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "what is 1 + 2?"}')
    async with fake_buffer() as buffer, asyncio.timeout(60):
        buffer.plan["group_size"] = 1
        await BaseGenerator(engine_url, buffer.url, 1, max_attempts=1).run_async(path, two_turns, reward)
    spans = [span for sample in buffer.samples for span in sample["token_spans"] if span["source"] == "llm"]
    assert {tuple(span["sampling"].items()) for span in spans} == {(("temperature", 2.0),), ()}
    assert await largest(engine_url, buffer.samples) > 0.05
    kept = rows(buffer.samples, only_policy_logprobs=True)
    assert sum(sum(row["loss_mask"]) for row in kept) == NUM_TOKENS
    assert await largest(engine_url, kept) <= EXACT
