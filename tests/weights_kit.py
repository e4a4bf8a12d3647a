"""Runs on a real engine whose weights change in place under names that were used before, and their tokens scored."""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from forebay.client import AsyncBufferClient
from forebay.engines.capture.fill_gaps import score
from forebay.generators.base import BaseGenerator, single_turn
from tests.kit import Json, ServerProcess
from tests.lent import lent_url

MAX_DELTA = 1e-4
LIMIT_S = 300.0
SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@dataclass
class WeightsRun:
    """A run of the base generator in this process, and its trainer."""

    client: AsyncBufferClient
    engine_url: str
    buffer_url: str
    folder: Path
    prompts: Sequence[str]
    _passes: list[Path] = field(default_factory=list)

    def start(self, budget: int, *, num_process: int = 16) -> "asyncio.Task[Any]":
        """Two rollouts for each prompt, all of the budget long."""
        name = f"{self.client.run_id}-{len(self._passes)}"
        path = self.folder / f"{name}.jsonl"
        rows = [{"instance_id": f"{name}-{n}", "prompt": prompt} for n, prompt in enumerate(self.prompts)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self._passes.append(path)

        async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
            return await single_turn(client, messages, {**params, "max_tokens": budget})

        # In turns: groups of equal rewards are not delivered.
        rewards: defaultdict[str, Iterator[int]] = defaultdict(count)

        async def reward(item: Json) -> float:
            return float(next(rewards[item["instance_id"]]))

        generator = BaseGenerator(self.engine_url, self.buffer_url, num_process=num_process, sampling_params=SAMPLING)
        return asyncio.create_task(generator.run_async(path, rollout, reward))

    async def rows(self) -> list[Json]:
        """What the last pass has brought, which has ended."""
        batch = await self.client.read(num_groups=len(self.prompts), wait_s=LIMIT_S)
        assert batch is not None
        await self.client.ack(batch)
        return list(batch.rows)

    async def sample(self, budget: int = 8) -> list[Json]:
        """The samples of a whole pass."""
        await self.start(budget)
        return await self.rows()


@asynccontextmanager
async def weights_run(
    server: ServerProcess, engine_url: str, folder: Path, prompts: Sequence[str], **settings: Any
) -> AsyncIterator[WeightsRun]:
    """A run with groups of two; ``server`` is one that lends its runs."""
    async with AsyncBufferClient(server.url) as client, asyncio.timeout(LIMIT_S):
        rows = folder / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "?"}))
        await client.start("lent", 2, rows, remote_engine_url=engine_url, **settings)
        url = await asyncio.to_thread(lent_url, server, client.run_id)
        yield WeightsRun(client, engine_url, url, folder, prompts)
        await client.stop()


async def load_weights(engine_url: str, folder: Path, version: str, *, flushes_cache: bool) -> None:
    """Other weights for an engine that is idle, as a trainer gives them by itself."""
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": flushes_cache}
        reply = await http.post(f"{engine_url}/update_weights_from_disk", json=body)
        assert reply.status_code == 200, reply.text


async def scores_of(engine_url: str, samples: Sequence[Json]) -> list[list[float]]:
    """What the engine's weights of now say of each token of each sample."""
    async with httpx.AsyncClient(timeout=60) as http:
        return [(await score(http, engine_url, sample["tokens"])).logprobs for sample in samples]


def marked(sample: Json) -> set[int]:
    """The positions that are said to have been sampled over a mixed cache."""
    spans = [span for span in sample["token_spans"] if span.get("mixed_kv")]
    return {at for span in spans for at in range(span["start"], span["end"])}


def wrong(sample: Json, *scored: Sequence[float]) -> list[int]:
    """The positions, trained on and not marked, whose logprob is that of none of the scored weights."""
    taken = [at for at, bit in enumerate(sample["loss_mask"]) if bit and at not in marked(sample)]
    return [at for at in taken if not any(_agree(sample["logprobs"][at], scores[at]) for scores in scored)]


def _agree(recorded: float, scored: float) -> bool:
    # SGLang tells no logprob of the last id of its vocabulary.
    return math.isnan(scored) or abs(recorded - scored) <= MAX_DELTA
