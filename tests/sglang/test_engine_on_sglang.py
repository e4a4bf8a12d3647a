"""The engine clients against the real SGLang, directly and behind its router."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from forebay.engines.abc import EngineLoad
from forebay.engines.aborts import abort_prefix
from forebay.engines.detect import DetectedEngine
from forebay.engines.openai import OpenAIEngine
from forebay.engines.sglang import SGLangEngine

pytestmark = pytest.mark.sglang

LONG = {"max_tokens": 1900, "temperature": 1.0, "ignore_eos": True}
IDLE_S = 6.0


@pytest.fixture(params=["direct", "router"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("sglang_url" if request.param == "direct" else "sglang_router_url"))


@dataclass(frozen=True)
class ChatReply:
    """What a chat brought; ``raw`` is all of it."""

    raw: dict[str, Any]

    @property
    def finish_reason(self) -> str:
        return str(self.raw["choices"][0]["finish_reason"])

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason == "abort"

    @property
    def num_sampled(self) -> int:
        return int(self.raw["usage"]["completion_tokens"])


async def chat(url: str, prompt: str = "what is 1 + 2?", **fields: Any) -> ChatReply:
    """One chat, sent as any client would; ``fields`` are those of its body."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(timeout=60) as http:
        return ChatReply((await http.post(f"{url}/v1/chat/completions", json=body)).raise_for_status().json())


async def load_becomes(url: str, wanted: Callable[[EngineLoad], bool], within_s: float) -> float:
    """Seconds until the engine at ``url`` has a load like this."""
    began_s = time.monotonic()
    async with SGLangEngine(url) as engine, asyncio.timeout(within_s):
        while not wanted(await engine.load() or EngineLoad()):  # noqa: ASYNC110 - the engine must be asked
            await asyncio.sleep(0.02)
    return time.monotonic() - began_s


async def becomes_idle(url: str) -> float:
    """Seconds until the engine at ``url`` has nothing left; fails after ``IDLE_S``."""
    return await load_becomes(url, lambda load: load.idle, IDLE_S)


async def start(sglang_url: str, rids: list[str], **fields: Any) -> list[asyncio.Task[ChatReply]]:
    """Start a long chat for each rid and return when the engine generates for all."""
    chats = [asyncio.create_task(chat(sglang_url, rid=rid, **LONG, **fields)) for rid in rids]
    await load_becomes(sglang_url, lambda load: load.running == len(rids) * fields.get("n", 1), 20)
    return chats


async def test_model_info_load_and_kind(url: str, sglang_url: str) -> None:
    async with DetectedEngine(url) as engine:
        assert type(await engine.found()) is SGLangEngine
        info = await engine.model_info()
        assert (info.model, info.weight_version) == ("tiny", "default")
        assert await engine.load() == EngineLoad()
        assert await engine.is_available()
    async with SGLangEngine(url) as direct:
        assert await direct.workers() == [sglang_url]
    async with OpenAIEngine(url) as plain:
        assert (await plain.model_info()).model == "tiny"


async def test_abort_by_prefix_stops_a_groups_calls_only(url: str, sglang_url: str) -> None:
    async with DetectedEngine(url) as engine:
        chats = await start(sglang_url, ["fb-a-0", "fb-a-1", "fb-a-2", "fb-b-0"])
        began_s = time.monotonic()
        assert await engine.abort("fb-a-", timeout_s=1.0) == 1
        replies = await asyncio.wait_for(asyncio.gather(*chats[:3]), IDLE_S)
        assert time.monotonic() - began_s < IDLE_S
        assert all(reply.is_aborted and 0 < reply.num_sampled < 1900 for reply in replies)
        assert not chats[3].done()
        assert await engine.abort("fb-b-") == 1
        assert (await chats[3]).is_aborted
        await becomes_idle(sglang_url)


async def test_queued_calls_are_aborted_as_well(url: str, sglang_url: str) -> None:
    async with DetectedEngine(url) as engine:
        chats = [asyncio.create_task(chat(sglang_url, rid=f"fb-q-{n:02}", **LONG)) for n in range(24)]
        await load_becomes(sglang_url, lambda load: load.waiting > 0 and load.running + load.waiting == 24, 30)
        assert await engine.abort("fb-q-") == 1
        assert all(reply.is_aborted for reply in await asyncio.wait_for(asyncio.gather(*chats), IDLE_S))


async def test_abort_right_after_the_calls_were_sent_catches_them_all(url: str, sglang_url: str) -> None:
    async with DetectedEngine(url) as engine:
        await chat(sglang_url)
        chats = [asyncio.create_task(chat(sglang_url, rid=f"fb-s-{n}", **LONG)) for n in range(8)]
        await asyncio.sleep(0)
        began_s = time.monotonic()
        await engine.abort("fb-s-")
        for task in chats:
            task.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
        await becomes_idle(sglang_url)
        assert time.monotonic() - began_s < IDLE_S


async def test_calls_of_a_dead_client_are_aborted_by_prefix(url: str, sglang_url: str) -> None:
    # No engine object knows these calls: a plain client sent them and its connections stay open.
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **LONG}
        calls = [http.post(f"{sglang_url}/v1/chat/completions", json={**body, "rid": f"fb-d-{n}"}) for n in range(3)]
        chats = [asyncio.create_task(call) for call in calls]
        await load_becomes(sglang_url, lambda load: load.running == 3, 20)
        assert await abort_prefix(url, "fb-d-") == 1
        await becomes_idle(sglang_url)
        for task in chats:
            assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_abort_all_stops_calls_with_several_choices(url: str, sglang_url: str) -> None:
    async with DetectedEngine(url) as engine:
        chats = await start(sglang_url, ["fb-n-0"], n=3)
        assert await engine.abort_all() == 1
        assert (await chats[0]).is_aborted
        await becomes_idle(sglang_url)
