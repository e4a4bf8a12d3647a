"""vLLM is administered like SGLang: its load, aborts, pauses and weights."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from forebay.core.errors import InvalidInput, WeightUpdateFailed
from forebay.core.weight_versions import PauseMode
from forebay.engines import weight_updates
from forebay.engines.abc import EngineLoad
from forebay.engines.detect import DetectedEngine
from forebay.engines.dialect import SGLANG, VLLM
from forebay.engines.router_workers import admin_client
from forebay.engines.scripted import Reply
from tests.engines.fake_vllm import FakeVLLM
from tests.engines.vllm_wire import VLLMWire
from tests.kit import TIME_LIMIT_S


class TestFake(VLLMWire):
    @pytest.fixture
    async def wire(self) -> AsyncIterator[httpx.AsyncClient]:
        async with (
            FakeVLLM(lambda call: ("one two three four " * 9)[len(call.said) :], model="tiny") as engine,
            httpx.AsyncClient(base_url=engine.url, timeout=TIME_LIMIT_S) as http,
        ):
            yield http


CHAT = {"model": "m", "messages": [{"role": "user", "content": "?"}], "return_weight_versions": True}


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLM]:
    """An engine whose replies never end."""
    async with FakeVLLM(lambda _: Reply(text="so far", hang=True)) as engine:
        yield engine


async def chat(server: FakeVLLM, rid: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
        reply = await http.post(f"{server.url}/v1/chat/completions", json={**CHAT, "request_id": rid})
    return dict(reply.raise_for_status().json()["choices"][0])


async def test_it_is_detected_and_tells_its_load_and_weights(server: FakeVLLM) -> None:
    async with DetectedEngine(server.url) as engine:
        asking = [asyncio.create_task(chat(server, f"fb-{at}")) for at in range(2)]
        await server.wait_in_flight(2)
        assert (await engine.found()).dialect is VLLM
        assert await engine.load() == EngineLoad(running=2, waiting=0)
        info = await engine.model_info()
        assert (info.model, info.weight_version) == ("scripted", "default")
        assert await engine.abort("fb-") is None, "it has no aborts by a prefix"
        assert await engine.abort_all() == 1
        assert [choice["finish_reason"] for choice in await asyncio.gather(*asking)] == ["abort", "abort"]


@pytest.mark.parametrize("dev_mode", [True, False])
async def test_a_call_is_aborted_by_its_exact_id(server: FakeVLLM, dev_mode: bool) -> None:
    server.dev_mode, server.scale_out = dev_mode, not dev_mode
    asking = {rid: asyncio.create_task(chat(server, rid)) for rid in ("fb-1", "fb-10")}
    await server.wait_in_flight(2)
    async with admin_client(None) as http:
        admin = VLLM.admin(http, server.url)
        assert await admin.abort("fb-1")
        assert (await asking["fb-1"])["finish_reason"] == "abort"
        assert not asking["fb-10"].done()
        server.dev_mode = server.scale_out = False
        assert not await admin.abort("fb-10")


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_weights_change_in_a_pause(server: FakeVLLM, mode: PauseMode) -> None:
    asking = asyncio.create_task(chat(server, "fb-1"))
    await server.wait_in_flight(1)
    async with admin_client(None) as http:
        workers = await weight_updates.workers_of(http, [server.url])
        await weight_updates.pause(workers, mode)
        await weight_updates.wait_idle(workers, mode)
        if mode == "abort":
            await asking
        assert asking.done() is (mode == "abort")
        name = await weight_updates.update(workers, "/models/7", 7, mode)
        # A server that was started again does not know the kind of what it has to resume.
        again = [SGLANG.admin(http, server.url)]
        assert await weight_updates.resume(again, 60) == []
        assert (server.paused, server.weight_version, name) == (None, "7", "7")
        assert [each["model_path"] for each in server.weight_updates] == ["/models/7"]
        if mode == "in_place":
            await workers[0].abort("fb-1")
    await asking


async def test_what_it_cannot_do_is_refused_with_a_remedy(server: FakeVLLM) -> None:
    async with admin_client(None) as http:
        (worker,) = await weight_updates.workers_of(http, [server.url])
        with pytest.raises(InvalidInput, match="retract"):
            await weight_updates.pause([worker], "retract")
        server.dev_mode = False
        with pytest.raises(InvalidInput) as refused:
            await weight_updates.workers_of(http, [server.url])
        assert "VLLM_SERVER_DEV_MODE=1" in str(refused.value.hint)
        with pytest.raises(WeightUpdateFailed):
            await weight_updates.update([worker], "/models/7", 7, "abort")
