"""The real SGLang and its router, with workers that cannot be reached from here, as it seems."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.capture.checking import check
from forebay.engines.dialect import SGLANG
from forebay.generators.base import BaseGenerator, single_turn
from tests.engines.template_kit import hiding_router
from tests.sglang.partial_kit import SAMPLING, abort_at_random, check_whole, fake_buffer, load_of, reward

pytestmark = pytest.mark.sglang

NUM_ROLLOUTS = 40
MAX_DELTA = 1e-4


async def talk(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """Two turns, the second one an own call."""
    messages, _ = await single_turn(client, messages, {**params, "max_tokens": 12})
    messages = [*messages, {"role": "user", "content": "and é?"}]
    reply = await client.chat.completions.create(model="tiny", messages=messages, temperature=1.0, max_tokens=12)
    return [*messages, reply.choices[0].message], reply.choices[0].finish_reason


async def budgeted(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return await single_turn(client, messages, {**params, "max_tokens": client.rollout.row["budget"]})


@pytest.mark.parametrize("rollout", [talk, budgeted])
async def test_samples_over_generate_have_the_engines_logprobs_also_after_aborts(
    sglang_url: str, sglang_router_url: str, sglang_model: Path, tmp_path: Path, rollout: Any
) -> None:
    rows = [{"instance_id": n, "prompt": f"{n} + 2?", "budget": random.randint(20, 120)} for n in range(NUM_ROLLOUTS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    async with (
        fake_buffer() as buffer,
        hiding_router(sglang_router_url, url="http://127.0.0.1:1") as (router, url),
        asyncio.timeout(300),
    ):
        generator = BaseGenerator(
            url, buffer.url, num_process=16, sampling_params=SAMPLING, template_path=sglang_model, max_attempts=1
        )
        aborting = asyncio.create_task(abort_at_random(SGLANG, sglang_url))
        await generator.run_async(tmp_path / "rows.jsonl", rollout, reward)
        aborting.cancel()
    assert await load_of(sglang_url) == 0
    assert set(router.asked) == {"/generate"}
    mains = [sample for sample in buffer.samples if not sample.get("fork")]
    assert len(mains) == NUM_ROLLOUTS
    if rollout is budgeted:
        for sample in mains:
            check_whole(sample, sample["extra_info"]["budget"])
        assert sum("segments" in sample["extra_info"] for sample in mains) > NUM_ROLLOUTS / 4
    deltas = [(await check(sglang_url, sample)).max_delta for sample in buffer.samples]
    print(f"the largest difference of {len(deltas)} samples is {max(deltas):.1e}")
    assert max(deltas) <= MAX_DELTA
