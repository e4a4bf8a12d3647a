"""Over-sampling against the real SGLang: what is aborted leaves the engine idle, what is kept goes on from there."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.client import AsyncBufferClient
from forebay.engines.abc import EngineLoad
from forebay.engines.sglang import SGLangEngine
from forebay.generators.base import BaseGenerator, single_turn
from tests.kit import ServerProcess
from tests.lent import lend_runs, lent_url

pytestmark = pytest.mark.sglang

SHORT, LONG = 8, 300
LIMIT_S = 120.0


async def by_row(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """As many tokens as the row asks for; of each group's spares, far more."""
    is_spare = client.rollout.slot >= 2
    return await single_turn(client, messages, params | {"max_tokens": 1900 if is_spare else client.rollout.row["num"]})


async def reward(item: dict[str, Any]) -> float:
    return float(int(item["uid"][-1], 16) % 2)


async def wait_idle(url: str) -> None:
    async with SGLangEngine(url) as engine, asyncio.timeout(LIMIT_S):
        while not (await engine.load() or EngineLoad()).idle:  # noqa: ASYNC110 - the engine must be asked
            await asyncio.sleep(0.05)


async def test_spares_are_aborted_and_kept_rollouts_go_on_from_their_tokens(
    server: ServerProcess, sglang_url: str, tmp_path: Path
) -> None:
    lend_runs(server)
    rows = [{"instance_id": name, "prompt": "count", "num": num} for name, num in (("short", SHORT), ("long", LONG))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    oversampling = {"rollouts_per_group": 3, "groups_per_step": 1, "leftover": "keep"}
    async with AsyncBufferClient(server.url) as client:
        await client.start("lent", 2, tmp_path / "rows.jsonl", remote_engine_url=sglang_url, oversampling=oversampling)
        url = await asyncio.to_thread(lent_url, server, client.run_id)
        sampling = {"temperature": 1.0, "ignore_eos": True}
        generator = BaseGenerator(sglang_url, url, num_process=6, sampling_params=sampling, max_attempts=1)
        running = asyncio.create_task(generator.run_async(tmp_path / "rows.jsonl", by_row, reward))
        first = await client.read(num_groups=1, wait_s=LIMIT_S)
        await wait_idle(sglang_url)
        assert (await client.stats()).is_held
        await client.set_weight_version(1)
        second = await client.read(num_groups=1, wait_s=LIMIT_S)
        await wait_idle(sglang_url)
        totals = await running
        stats = await client.stats()
    assert first is not None
    assert second is not None
    lengths = {row["instance_id"]: sum(row["loss_mask"]) for row in (*first.rows, *second.rows)}
    assert lengths == {"short": SHORT, "long": LONG}
    assert all(len(row["tokens"]) == len(row["logprobs"]) for row in second.rows)
    assert stats.counts["rollouts_held"] > 0
    assert totals.counts["rollouts_aborted"] == 2
    assert totals.counts["tokens_finished"] == 2 * (SHORT + LONG)
