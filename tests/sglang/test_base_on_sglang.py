"""The base generator against the real SGLang, directly and behind its router."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.abc import EngineLoad
from forebay.engines.sglang import SGLangEngine
from forebay.generators.base import BaseGenerator, query_single_turn, single_turn

pytestmark = pytest.mark.sglang

NO_BUFFER = "http://127.0.0.1:9"
"""Nothing is ever finished here, so nothing is ever written."""
DEADLINE_S = 4.0
IDLE_S = 6.0
LONG = {"max_tokens": 1900, "temperature": 1.0, "ignore_eos": True}


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def wait_load(url: str, is_idle: bool, within_s: float) -> None:
    async with SGLangEngine(url) as engine, asyncio.timeout(within_s):
        while (await engine.load() or EngineLoad()).idle is not is_idle:  # noqa: ASYNC110 - the engine must be asked
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
@pytest.mark.parametrize("address", ["sglang_url", "sglang_router_url"])
async def test_a_hanging_group_leaves_the_engine_idle(
    request: pytest.FixtureRequest, tmp_path: Path, address: str, rollout: Any
) -> None:
    url = request.getfixturevalue(address)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "what is 1 + 2?"}))
    generator = BaseGenerator(
        url, NO_BUFFER, 8, num_process=8, sampling_params=LONG, group_deadline_s=DEADLINE_S, max_attempts=1
    )
    ends_s = time.monotonic() + DEADLINE_S
    running = asyncio.create_task(generator.run_async(tmp_path / "rows.jsonl", rollout, reward))
    await wait_load(url, is_idle=False, within_s=20)
    await wait_load(url, is_idle=True, within_s=DEADLINE_S + IDLE_S)
    assert time.monotonic() >= ends_s, "the calls ended by themselves: the test shows nothing"
    async with asyncio.timeout(30):
        totals = await running
    assert (totals.num_groups_closed, totals.num_completed) == (1, 0)
