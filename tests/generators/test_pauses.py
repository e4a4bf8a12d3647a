"""Engines that stand still on the trainer's word, as a run of the base generator lives through it."""

from typing import Any

import httpx
import pytest

from forebay.engines.scripted import Reply
from tests.conftest import MakeServer
from tests.generators.bench_kit import bench
from tests.kit import ServerProcess
from tests.lent import lend_runs

LIMITS = {"group_timeout_seconds": 1.0, "group_deadline_seconds": 1.0}
TEXTS = ["x" * 40 + " 1", "x" * 40 + " 2"]


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


async def own_call(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    reply = await client.chat.completions.create(model="m", messages=messages)
    (choice,) = reply.choices
    return [*messages, {"role": "assistant", "content": choice.message.content}], choice.finish_reason


def own_call_in_a_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    reply = client.chat.completions.create(model="m", messages=messages)
    (choice,) = reply.choices
    return [*messages, {"role": "assistant", "content": choice.message.content}], choice.finish_reason


def saying_slowly() -> Any:
    """Each rollout its own text, which it is recognised by when it goes on."""
    left = list(TEXTS)

    def script(call: Any) -> Reply:
        text = next((text for text in TEXTS if call.said and text.startswith(call.said)), None)
        text = left.pop() if text is None and left else text or TEXTS[call.number % 2]
        return Reply(text=text[len(call.said) :], tokens_per_s=100)

    return script


@pytest.mark.parametrize("rollout", [own_call, own_call_in_a_thread])
@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_a_pause_longer_than_the_deadline_costs_no_group(lending, tmp_path, mode: str, rollout: Any) -> None:
    async with bench(lending, tmp_path, saying_slowly(), rollout, "a", **LIMITS) as run:
        await run.engine.wait_in_flight(2)
        async with httpx.AsyncClient(base_url=f"{lending.url}/v1/runs/{run.client.run_id}", timeout=30) as http:
            await http.post("/engines/pause", json={"mode": mode})
            assert (await run.client.stats()).is_paused
            assert await run.client.read(num_groups=1, wait_s=1.5) is None
            assert (await run.client.stats()).discarded == {}
            await http.post("/engines/continue", json={"weight_version": 1})
        rows = await run.read(1)
        assert not (await run.client.stats()).is_paused
    assert {row["extra_info"]["finish_reason"] for row in rows} == {"stop"}
    assert all(row["messages"][-1]["content"] in TEXTS for row in rows)
    assert all(1 in row["weight_versions"] for row in rows)
