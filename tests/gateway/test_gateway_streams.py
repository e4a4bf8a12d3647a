"""Streams that nobody reads to their end, and streams during which the weights change."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.gateway.runs.worker_versions import WorkerVersions
from forebay.web.serving import serve_app
from tests.engines.fake_vllm import FakeVLLM
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import LIMIT_S, USER, Json, OpenedAt, assert_whole, gateway_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = {"sglang": ScriptedEngine, "vllm": FakeVLLM}

BEGUN = "as far as this"
FIRST = re.compile(r'"(content|text|delta)":"a')
"""The first text of an answer, in any protocol."""
PATHS: dict[str, Json] = {
    "chat/completions": {"messages": [USER]},
    "responses": {"input": "2+2?"},
    "../anthropic/v1/messages": {"messages": [USER], "max_tokens": 64},
}


@asynccontextmanager
async def streaming(
    rollout: OpenedAt, path: str = "chat/completions", **fields: Any
) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a streamed answer, as they come."""
    url = f"{rollout.base_url}/{path}".replace("/v1/../", "/")
    body = {"model": "m", "stream": True, **(fields or PATHS[path])}
    headers = {"Authorization": f"Bearer {rollout.key}"}
    async with httpx.AsyncClient(timeout=30) as http, http.stream("POST", url, json=body, headers=headers) as reply:
        assert reply.status_code == 200
        yield reply.aiter_lines()


async def new_weights(stage: Stage, version: str) -> None:
    told = {"new_version": version, "abort_all_requests": False}
    (await stage.gateway.http.post(f"{stage.engine.url}/update_weight_version", json=told)).raise_for_status()


@pytest.mark.parametrize("path", PATHS)
async def test_what_an_agent_has_read_before_it_went_away_is_recorded(stage: Stage, path: str) -> None:
    stage(Reply(text=BEGUN, hang=True))
    rollout = await stage.open()
    async with streaming(rollout, path) as lines:
        async for line in lines:
            if FIRST.search(line):
                break
    await stage.busy(0)
    async with asyncio.timeout(LIMIT_S):
        while not (await rollout.record())["samples"]:  # noqa: ASYNC110 - the engine hears of it before that
            await asyncio.sleep(0.005)
    told = await rollout.close()
    (sample,) = told["samples"]
    assert_whole(sample)
    text = sample["messages"][-1]["content"]
    assert text.startswith(BEGUN[0])
    assert BEGUN.startswith(text)
    assert (sum(sample["loss_mask"]), told["failures"]) == (len(text), [])


async def test_the_agents_next_call_goes_on_from_what_it_has_read(stage: Stage) -> None:
    stage(lambda call: Reply(text=BEGUN, hang=True) if call is stage.calls[0] else "the end")
    rollout = await stage.open()
    async with streaming(rollout) as lines:
        read = ""
        while read != BEGUN:
            if (line := await anext(lines)).startswith("data: "):
                read += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    await rollout.chat(USER, {"role": "assistant", "content": BEGUN}, USER)
    told = await rollout.close()
    assert told["num_calls"] == 2
    assert "forked" not in told["counters"]
    (sample,) = told["samples"]
    assert sum(sample["loss_mask"]) == len(BEGUN) + len("the end") + 1


async def test_an_agent_that_is_gone_before_the_first_token_leaves_nothing(stage: Stage) -> None:
    stage(Reply(hang=True))
    rollout = await stage.open()
    asking = asyncio.create_task(rollout.post("chat/completions", {"messages": [USER], "stream": True}))
    await stage.busy()
    asking.cancel()
    await stage.busy(0)
    assert (await rollout.close())["samples"] == []


async def test_a_plain_server_is_recorded_as_far_as_it_was_read() -> None:
    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def said() -> AsyncIterator[str]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": BEGUN}, "finish_reason": None}
        yield f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
        await asyncio.Event().wait()

    async def chats(_: Request) -> Response:
        return StreamingResponse(said(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chats, methods=["POST"])])
    async with serve_app(app) as port, gateway_before(f"http://127.0.0.1:{port}") as gateway:
        rollout = await gateway.open()
        async with streaming(rollout) as lines:
            await anext(lines)
        (sample,) = (await rollout.close())["samples"]
    assert (sample["messages"][-1]["content"], sample["retokenized"]) == (BEGUN, True)


async def test_weights_that_change_during_a_stream_are_noticed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.gateway.runs.worker_versions.FRESH_S", 0.0)
    stage(Reply(text="x" * 50, delay_s=6))
    rollout = await stage.open()
    await new_weights(stage, "3")
    async with streaming(rollout) as lines:
        await anext(lines)
        await new_weights(stage, "4")
        async for _ in lines:
            pass
    (sample,) = (await rollout.close())["samples"]
    assert sample["weight_versions"] == [3, 4]
    assert any(span.get("mixed_kv") for span in sample["token_spans"])


async def test_each_stream_after_an_announcement_has_the_new_weights_alone(stage: Stage) -> None:
    stage("four")
    rollout = await stage.open()
    for version in (5, 6):
        await new_weights(stage, str(version))
        await rollout.chat()
        before = stage.key_of(stage.calls[-1])
        stage.gateway.buffer.weight_version = version
        stage.gateway.buffer.close_group("none of them")
        async with asyncio.timeout(LIMIT_S):
            while stage.key_of(stage.calls[-1]) == before:
                await rollout.chat()
        streamed = await stage.open()
        async with streaming(streamed) as lines:
            assert [line async for line in lines][-2] == "data: [DONE]"
        (sample,) = (await streamed.close())["samples"]
        assert sample["weight_version"] == version
    stage.gateway.buffer.weight_version = None


async def test_streams_share_what_a_worker_is_asked() -> None:
    asked: list[str] = []

    async def ask(url: str) -> str:
        asked.append(url)
        await asyncio.sleep(0)
        return str(len(asked))

    versions = WorkerVersions(ask)
    assert await asyncio.gather(*(versions.before("one", None) for _ in range(32))) == ["1"] * 32
    assert await asyncio.gather(*(versions.after("one", None) for _ in range(32))) == ["2"] * 32
    assert await versions.before("one", None) == "2"
    assert await versions.before("one", 7) == "3", "after an announcement nothing is known"
    assert await versions.before("other", 7) == "4"
    assert asked == ["one", "one", "one", "other"]
