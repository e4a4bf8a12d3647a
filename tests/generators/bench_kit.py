"""Runs of the base generator in this process, through a real server, against a scripted engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forebay.client import AsyncBufferClient
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, Totals, single_turn
from tests.kit import ServerProcess
from tests.lent import lent_url

HANGS = Reply(text="one two ", hang=True)
LIMIT_S = 30.0


async def reward(item: dict[str, Any]) -> float:
    """Within [0, 1], by the number that an answer ends with: different numbers (below 500), different rewards."""
    return float(item["messages"][-1]["content"].split()[-1]) * 0.618 % 1


class Script:
    """Answers by prompt and by how often it was asked before; what it has no answer for hangs after two words.

    Whatever is an answer comes once ``num_hung`` calls have said their two words: what ends because of it ends there.
    """

    def __init__(self, num_hung: int = 0, **answers: list[str | Reply]) -> None:
        self.answers = answers
        self._num_hung = num_hung
        self._hung: list[ScriptedCall] = []

    async def __call__(self, call: ScriptedCall) -> str | Reply:
        prompt = next(m["content"] for m in call.messages if m["role"] == "user")
        answers = self.answers.get(prompt) or [HANGS]
        answer = answers.pop(0) if len(answers) > 1 or answers[0] is not HANGS else HANGS
        if answer is HANGS:
            self._hung.append(call)
            return answer
        while sum(hung.sampled_ids == HANGS.tokens() for hung in self._hung) < self._num_hung:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # no event tells what was said
        return answer


class Bench:
    """A run on the server, the engine that it asks, and its trainer."""

    def __init__(self, client: AsyncBufferClient, engine: ScriptedEngine, running: "asyncio.Task[Totals]") -> None:
        self.client = client
        self.engine = engine
        self.running = running

    async def until(self, holds: Callable[[Any], object]) -> Any:
        """The run's numbers, once ``holds`` of them."""
        async with asyncio.timeout(LIMIT_S):
            while not holds(stats := await self.client.stats()):  # noqa: ASYNC110 -- another process; nothing to wait on
                await asyncio.sleep(0.01)
        return stats

    async def read(self, num_groups: int) -> list[dict[str, Any]]:
        batch = await self.client.read(num_groups=num_groups, wait_s=LIMIT_S)
        assert batch is not None
        return list(batch.rows)

    async def reads_nothing(self) -> bool:
        return await self.client.read(num_groups=1, wait_s=0) is None


@asynccontextmanager
async def bench(
    server: ServerProcess, folder: Path, script: Any, rollout: Any = single_turn, rows: str = "abc", **settings: Any
) -> AsyncIterator[Bench]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"instance_id": name, "prompt": name}) + "\n" for name in rows))
    async with ScriptedEngine(script) as engine, AsyncBufferClient(server.url) as client:
        await client.start("lent", 2, path, remote_engine_url=engine.url, **settings)
        url = await asyncio.to_thread(lent_url, server, client.run_id)
        generator = BaseGenerator(engine.url, url, num_process=8, max_attempts=1)
        running = asyncio.create_task(generator.run_async(path, rollout, reward))
        try:
            yield Bench(client, engine, running)
        finally:
            await client.stop()
            async with asyncio.timeout(LIMIT_S):
                await running
