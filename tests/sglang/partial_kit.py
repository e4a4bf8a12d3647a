"""Rollouts on a real engine that are cut by aborts or by other weights, and the samples that come of them."""

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from forebay.core.errors import EngineError
from forebay.engines.dialect import EngineDialect
from forebay.engines.router_workers import WorkerAdmin, admin_client
from forebay.generators.base import BaseGenerator, single_turn
from tests.generators.conftest import FakeBuffer
from tests.kit import TIME_LIMIT_S, Json

SAMPLING = {"temperature": 1.0, "ignore_eos": True}


def changed_weights(model: Path, folder: Path) -> Path:
    """A copy of a model folder with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(5)
    old = load_file(model / "model.safetensors")
    new = {name: each + 0.02 * torch.randn(each.shape, generator=generator) for name, each in old.items()}
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@asynccontextmanager
async def fake_buffer() -> AsyncIterator[FakeBuffer]:
    """A buffer in this process, groups of one."""
    async with FakeBuffer().served() as fake:
        fake.plan |= {"group_size": 1}
        yield fake


async def reward(item: Json) -> float:
    return 1.0


def start_rollouts(buffer: FakeBuffer, url: str, rows: Path, num_process: int) -> asyncio.Task[Any]:
    """One rollout for each row, which says how many tokens it may have."""

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await single_turn(client, messages, {**params, "max_tokens": client.rollout.row["budget"]})

    generator = BaseGenerator(url, buffer.url, num_process=num_process, sampling_params=SAMPLING)
    return asyncio.create_task(generator.run_async(rows, rollout, reward))


async def load_of(url: str) -> int:
    """Calls at the engine, running or waiting."""
    async with admin_client(None) as http:
        load = await WorkerAdmin(http, url).load()
    assert load is not None
    return load.running + load.waiting


async def until_in_the_middle(url: str, num_calls: int, num_tokens: int = 30) -> None:
    """Return when so many calls run and have about so many tokens each, or more."""
    async with asyncio.timeout(2 * TIME_LIMIT_S), httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
        while True:
            (rank,) = (await http.get(f"{url}/v1/loads", params={"include": "core"})).json()["loads"]
            if rank["num_running_reqs"] == num_calls and rank["num_used_tokens"] >= num_calls * num_tokens:
                return
            await asyncio.sleep(0.02)


def write_rows(folder: Path, budgets: list[int]) -> Path:
    rows = [{"instance_id": n, "prompt": f"what is {n} + 2?", "budget": budget} for n, budget in enumerate(budgets)]
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


async def abort_at_random(dialect: EngineDialect, engine_url: str) -> None:
    """Abort everything that is in flight, again and again, every 0.15 s on average."""
    async with admin_client(None) as http:
        admin = dialect.admin(http, engine_url)
        while True:
            await asyncio.sleep(random.expovariate(1 / 0.15))
            with suppress(EngineError, TimeoutError):
                await admin.abort_all()


def check_whole(sample: Json, budget: int) -> None:
    """Exactly the budget was sampled, each token has its logprob, and the parts are those of the segments."""
    sampled = sum(sample["loss_mask"])
    assert sampled == budget
    num_prompt = len(sample["tokens"]) - budget
    assert sample["loss_mask"] == [0] * num_prompt + [1] * budget
    assert all(logprob < 0 for logprob in sample["logprobs"][num_prompt:])
    assert sample["extra_info"]["finish_reason"] == "length"
    for segments in sample["extra_info"].get("segments", []):
        assert sum(segments["completion_tokens"]) == budget
    spans = [span for span in sample["token_spans"] if span["source"] == "llm"]
    assert (spans[0]["start"], spans[-1]["end"]) == (num_prompt, len(sample["tokens"]))


async def put_weights(engine_url: str, folder: Path, version: int) -> None:
    """Other weights for an engine that is idle."""
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model_path": str(folder), "weight_version": str(version)}
        reply = await http.post(f"{engine_url}/update_weights_from_disk", json=body)
        assert reply.status_code == 200, reply.text
