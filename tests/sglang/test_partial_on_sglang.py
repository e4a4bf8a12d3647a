"""Turns that a real SGLang is made to abort, or whose weights change under them, against replays of their tokens."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from forebay.client import AsyncBufferClient
from forebay.core.weight_versions import PauseMode
from forebay.engines.capture.checking import check
from forebay.engines.dialect import SGLANG
from tests.kit import Json, ServerProcess
from tests.sglang.partial_kit import (
    abort_at_random,
    changed_weights,
    check_whole,
    fake_buffer,
    load_of,
    put_weights,
    start_rollouts,
    until_in_the_middle,
    write_rows,
)

pytestmark = pytest.mark.sglang

NUM_ABORTED = {"sglang_url": 200, "sglang_router_url": 40}
NUM_LONG, LONG_BUDGET = 6, 500
MAX_DELTA = 1e-4
OLD, NEW = 1, 2


@pytest.fixture(scope="module")
def new_weights(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_weights(sglang_model, tmp_path_factory.mktemp("weights") / "new")


@pytest.mark.parametrize("address", NUM_ABORTED)
async def test_turns_aborted_at_random_moments_are_whole_and_exact(
    request: pytest.FixtureRequest, sglang_url: str, address: str, tmp_path: Path
) -> None:
    url = request.getfixturevalue(address)
    budgets = [random.randint(20, 120) for _ in range(NUM_ABORTED[address])]
    async with fake_buffer() as buffer, asyncio.timeout(400):
        aborting = asyncio.create_task(abort_at_random(SGLANG, sglang_url))
        await start_rollouts(buffer, url, write_rows(tmp_path, budgets), num_process=16)
        aborting.cancel()
    assert await load_of(sglang_url) == 0
    assert len(buffer.samples) == len(budgets)
    deltas = []
    for sample in buffer.samples:
        check_whole(sample, sample["extra_info"]["budget"])
        deltas.append((await check(sglang_url, sample)).max_delta)
    num_cut = sum("segments" in sample["extra_info"] for sample in buffer.samples)
    print(f"{num_cut} of {len(budgets)} turns were cut; the largest difference is {max(deltas):.1e}")
    assert num_cut > len(budgets) / 4
    assert max(deltas) <= MAX_DELTA


async def samples_across_an_update(
    server: ServerProcess, engine_url: str, new_weights: Path, mode: PauseMode, folder: Path
) -> list[Json]:
    """Rollouts in whose middle the weights change from ``OLD`` to ``NEW``, by a trainer's word to the server."""
    run = server.start_run(remote_engine_url=engine_url)
    async with fake_buffer() as buffer, AsyncBufferClient(server.url) as client, asyncio.timeout(200):
        await client.attach(run.run_id)
        rollouts = start_rollouts(buffer, engine_url, write_rows(folder, [LONG_BUDGET] * NUM_LONG), NUM_LONG)
        await until_in_the_middle(engine_url, NUM_LONG)
        told = await client.update_weights(NEW, new_weights, mode)
        assert told.workers == [engine_url]
        await rollouts
    run.stop()
    return buffer.samples


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_each_token_has_the_logprob_of_its_own_weights(
    server: ServerProcess, changing_url: str, sglang_model: Path, new_weights: Path, tmp_path: Path, mode: Any
) -> None:
    await put_weights(changing_url, sglang_model, OLD)
    samples = await samples_across_an_update(server, changing_url, new_weights, mode, tmp_path)
    after = [await check(changing_url, sample, weight_version=NEW) for sample in samples]
    await put_weights(changing_url, sglang_model, OLD)
    before = [await check(changing_url, sample, weight_version=OLD) for sample in samples]
    for sample, old, new in zip(samples, before, after, strict=True):
        check_whole(sample, LONG_BUDGET)
        assert sample["weight_versions"] == [OLD, NEW]
        # SGLang tells no logprob of a prompt's token that is the last of its vocabulary.
        assert sum(part.num_tokens + part.num_unknown for part in (old, new)) == LONG_BUDGET
        assert min(old.num_tokens, new.num_tokens) > 0
        mixed = [span.get("mixed_kv", False) for span in sample["token_spans"] if span.get("weight_version") == NEW]
        assert mixed == [mode == "in_place"]
    told = [f"{max(each.max_delta for each in part):.1e}" for part in (before, after)]
    print(f"{mode}: largest differences before and after the update: {', '.join(told)}")
    assert max(each.max_delta for each in before) <= MAX_DELTA
    if mode != "in_place":
        assert max(each.max_delta for each in after) <= MAX_DELTA
