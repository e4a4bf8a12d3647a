"""Engines that stand still on the trainer's word, as a run of the base generator lives through it."""

import asyncio
from typing import Any

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedCall
from tests.conftest import MakeServer
from tests.generators.bench_kit import bench
from tests.kit import ServerProcess
from tests.lent import lend_runs

pytestmark = pytest.mark.usefixtures("with_and_without_workers")

LIMIT_S = 6.0
LIMITS = {"group_timeout_seconds": LIMIT_S, "group_deadline_seconds": LIMIT_S}


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


def asking(client: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": str(client.rollout.slot)}]}


def told(reply: Any) -> Any:
    choice = reply.choices[0]
    return [{"role": "assistant", "content": choice.message.content}], choice.finish_reason


async def own_call(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return told(await client.chat.completions.create(**asking(client)))


def own_call_in_a_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return told(client.chat.completions.create(**asking(client)))


def text_of(prompt: str) -> str:
    return "x" * 40 + f" {prompt}"


class Script:
    """Its calls end only after ``has_paused`` is set: those that an abort ends begin, those that are kept wait."""

    def __init__(self, mode: str) -> None:
        self.has_paused = asyncio.Event()
        self._mode = mode

    async def __call__(self, call: ScriptedCall) -> Reply:
        if self._mode == "abort" and not self.has_paused.is_set():
            return Reply(text=text_of(call.prompt)[:20], hang=True)
        await self.has_paused.wait()
        return Reply(text=text_of(call.prompt)[len(call.said) :])


@pytest.mark.parametrize(("mode", "rollout"), [("abort", own_call), ("retract", own_call_in_a_thread)])
async def test_a_pause_longer_than_the_deadline_costs_no_group(lending, tmp_path, mode: str, rollout: Any) -> None:
    script = Script(mode)
    async with bench(lending, tmp_path, script, rollout, "a", **LIMITS) as run:
        await run.engine.wait_in_flight(2)
        async with httpx.AsyncClient(base_url=f"{lending.url}/v1/runs/{run.client.run_id}", timeout=30) as http:
            await http.post("/engines/pause", json={"mode": mode})
            script.has_paused.set()
            assert (await run.client.stats()).is_paused
            assert await run.client.read(num_groups=1, wait_s=LIMIT_S + 0.5) is None
            assert (await run.client.stats()).discarded == {}
            await http.post("/engines/continue", json={"weight_version": 1})
        rows = await run.read(1)
        assert not (await run.client.stats()).is_paused
    assert {row["extra_info"]["finish_reason"] for row in rows} == {"stop"}
    assert sorted(row["messages"][-1]["content"] for row in rows) == [text_of("0"), text_of("1")]
    # What was said before the pause is of the first weights.
    assert [row.get("weight_versions", [row.get("weight_version")])[-1] for row in rows] == [1, 1]
