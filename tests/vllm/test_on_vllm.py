"""Samples from a real vLLM: each token has the logprob that the engine gives it again."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.core.weight_versions import PauseMode, number_of
from forebay.engines import weight_updates
from forebay.engines.dialect import VLLM
from forebay.engines.router_workers import admin_client
from tests.engines.vllm_wire import LIMIT_S, VLLMWire
from tests.gateway.gateway_kit import USER, assert_whole, gateway_before
from tests.kit import Json
from tests.sglang.partial_kit import (
    changed_weights,
    check_whole,
    fake_buffer,
    start_rollouts,
    write_rows,
)

pytestmark = pytest.mark.vllm

MAX_DELTA = 1e-4
NUM_ABORTED, NUM_LONG, LONG_BUDGET = 40, 4, 1500


class TestWire(VLLMWire):
    @pytest.fixture
    async def wire(self, vllm_url: str) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=vllm_url, timeout=LIMIT_S) as http:
            yield http


async def largest_delta(url: str, sample: Json, start: int = 0, end: int | None = None) -> float:
    """The largest difference between the logprobs of sampled tokens and those of one prefill."""
    params = {"max_tokens": 1, "prompt_logprobs": 0}
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        body = {"token_ids": sample["tokens"], "sampling_params": params}
        told = (await http.post(f"{url}/inference/v1/generate", json=body)).raise_for_status().json()
    again = [next(iter(each.values()))["logprob"] if each else 0.0 for each in told["prompt_logprobs"]]
    places = [place for place, bit in enumerate(sample["loss_mask"]) if bit][start:end]
    assert places
    return max(abs(sample["logprobs"][place] - again[place]) for place in places)


async def test_turns_aborted_at_random_moments_are_whole_and_exact(vllm_url: str, tmp_path: Path) -> None:
    budgets = [random.randint(100, 300) for _ in range(NUM_ABORTED)]
    async with fake_buffer() as buffer, asyncio.timeout(240):
        aborting = asyncio.create_task(abort_while_sampling(vllm_url))
        await start_rollouts(buffer, vllm_url, write_rows(tmp_path, budgets), num_process=8)
        aborting.cancel()
    assert len(buffer.samples) == NUM_ABORTED
    for sample in buffer.samples:
        check_whole(sample, sample["extra_info"]["budget"])
    deltas = [await largest_delta(vllm_url, sample) for sample in buffer.samples]
    num_cut = sum("segments" in sample["extra_info"] for sample in buffer.samples)
    print(f"{num_cut} of {NUM_ABORTED} turns were cut; the largest difference is {max(deltas):.1e}")
    assert num_cut > NUM_ABORTED / 4
    assert max(deltas) <= MAX_DELTA


async def change(url: str, folder: Path, version: int, mode: PauseMode) -> None:
    """As the server does it."""
    async with admin_client(None, 60) as http:
        workers = await weight_updates.workers_of(http, [url])
        await weight_updates.pause(workers, mode)
        await weight_updates.wait_idle(workers, mode)
        await weight_updates.update(workers, str(folder), version, mode)
        assert number_of(await workers[0].weight_version() or "") == version
        assert await weight_updates.resume(workers, 60) == []


async def until_running(url: str, num_calls: int) -> None:
    """Return when the engine runs so many calls: some may start half a second after the first."""
    async with admin_client(None) as http, asyncio.timeout(LIMIT_S):
        admin = VLLM.admin(http, url)
        while (load := await admin.load()) is None or load.running < num_calls:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.02)


async def until_sampled(url: str, num_tokens: int) -> None:
    """Return when the engine has sampled so many more tokens. The count is as old as its last step."""
    async with httpx.AsyncClient(timeout=LIMIT_S) as http, asyncio.timeout(LIMIT_S):

        async def num_sampled() -> float:
            lines = (await http.get(f"{url}/metrics")).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

        before = await num_sampled()
        while await num_sampled() < before + num_tokens:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.02)


async def abort_while_sampling(url: str) -> None:
    """Abort everything in flight, again and again, by tokens, because the machine may be fast or slow."""
    async with admin_client(None) as http:
        while True:
            await until_sampled(url, random.randint(1, 400))
            await VLLM.admin(http, url).abort_all()


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_weights_change_in_the_middle_of_turns(
    vllm_url: str, vllm_model: Path, tmp_path: Path, mode: PauseMode
) -> None:
    other = changed_weights(vllm_model, tmp_path / "other")
    async with fake_buffer() as buffer, asyncio.timeout(200):
        rollouts = start_rollouts(buffer, vllm_url, write_rows(tmp_path, [LONG_BUDGET] * NUM_LONG), NUM_LONG)
        await until_running(vllm_url, NUM_LONG)
        await until_sampled(vllm_url, 30 * NUM_LONG)
        await change(vllm_url, other, 2, mode)
        await rollouts
    for sample in buffer.samples:
        check_whole(sample, LONG_BUDGET)
        if mode == "abort":
            num_old = sample["extra_info"]["segments"][0]["completion_tokens"][0]
            assert await largest_delta(vllm_url, sample, num_old) <= MAX_DELTA
            assert await largest_delta(vllm_url, sample, 0, num_old) > MAX_DELTA
    await change(vllm_url, vllm_model, 1, "abort")
    for sample in buffer.samples:
        num_old = sample["extra_info"]["segments"][0]["completion_tokens"][0] if mode == "abort" else 1
        assert await largest_delta(vllm_url, sample, 0, num_old) <= MAX_DELTA


async def test_chats_and_streams_of_an_agent_are_exact(vllm_url: str) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "ignore_eos": True}
    async with gateway_before(vllm_url) as gateway:
        rollout = await gateway.open()
        whole = await rollout.chat(**fields)
        assert not {"prompt_token_ids", "token_ids"} & {*whole, *whole["choices"][0]}
        streamed = await rollout.post("chat/completions", {**fields, "messages": [USER], "stream": True})
        assert "token_ids" not in streamed.text
        samples = (await rollout.close())["samples"]
    assert len(samples) == 2
    for sample in samples:
        assert_whole(sample)
        assert sum(sample["loss_mask"]) == 30
        assert await largest_delta(vllm_url, sample) <= MAX_DELTA
        (span,) = [span for span in sample["token_spans"] if span["source"] == "llm"]
        assert span["sampling"] == {"logprobs": "raw"}
