"""Turns whose weights change under them: what each way to pause leaves of them, on the embedded engine."""

from pathlib import Path
from typing import Any

import pytest

from forebay.core.weight_versions import PauseMode
from forebay.engines import weight_updates
from forebay.engines.capture.checking import SampleCheck, check
from forebay.engines.router_workers import admin_client
from tests.kit import Json
from tests.sglang.partial_kit import (
    check_whole,
    fake_buffer,
    put_weights,
    start_rollouts,
    until_in_the_middle,
    write_rows,
)

NUM_TURNS, BUDGET = 3, 800
OLD, NEW = 1, 2
MAX_DELTA = 1e-4


async def change(engine_url: str, folder: Path, mode: PauseMode) -> None:
    """As the server does it."""
    async with admin_client(None, 60) as http:
        workers = await weight_updates.workers_of(http, [engine_url])
        await weight_updates.pause(workers, mode)
        await weight_updates.wait_idle(workers, mode)
        await weight_updates.update(workers, str(folder), NEW, mode)
        assert await weight_updates.resume(workers, 60) == []


async def samples_across_an_update(engine_url: str, other_folder: Path, mode: PauseMode, folder: Path) -> list[Json]:
    rows = write_rows(folder, [BUDGET] * NUM_TURNS)
    async with fake_buffer() as buffer:
        rollouts = start_rollouts(buffer, engine_url, rows, NUM_TURNS)
        await until_in_the_middle(engine_url, NUM_TURNS)
        await change(engine_url, other_folder, mode)
        await rollouts
    return buffer.samples


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_each_token_has_the_logprob_of_its_own_weights(
    own_engine_url: str, model_folder: Path, other_folder: Path, tmp_path: Path, mode: Any
) -> None:
    await put_weights(own_engine_url, model_folder, OLD)
    samples = await samples_across_an_update(own_engine_url, other_folder, mode, tmp_path)
    after = [await check(own_engine_url, sample, weight_version=NEW) for sample in samples]
    await put_weights(own_engine_url, model_folder, OLD)
    before = [await check(own_engine_url, sample, weight_version=OLD) for sample in samples]
    for sample, old, new in zip(samples, before, after, strict=True):
        check_whole(sample, BUDGET)
        assert sample["weight_versions"] == [OLD, NEW]
        assert old.num_tokens + old.num_unknown + new.num_tokens + new.num_unknown == BUDGET
        mixed = [span.get("mixed_kv", False) for span in sample["token_spans"] if span.get("weight_version") == NEW]
        assert mixed == [mode == "in_place"]
    assert largest(before) <= MAX_DELTA
    assert (largest(after) <= MAX_DELTA) is (mode != "in_place")


def largest(replays: list[SampleCheck]) -> float:
    return max(each.max_delta for each in replays)
