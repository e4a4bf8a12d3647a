"""Calls that are no chats: the gateway passes them on, bounds them as any other, and records nothing of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from forebay.engines.fake_sglang.routes import create_app
from forebay.engines.scripted.answers import ScriptedBackend
from forebay.web.serving import serve_app
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import LIMIT_S, USER, GatewayAt, Json, OpenedAt, assert_whole, eventually, gateway_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERSIONS = {"weight_version": "v1", "weight_versions": [{"version": "v1", "start": 0, "end": 3}], "took_s": 0.5}


class TextEngine:
    """A scripted engine which completes texts and embeds them besides."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Json]] = []
        self.hangs = False
        self.num_broken = 0
        self.released = asyncio.Event()
        backend = ScriptedBackend(lambda _: "4", "scripted", has_parsers=False)
        backend.open()
        self.backend = backend
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/embeddings", self._embed, methods=["POST"]),
                Route("/v1/models/{name:path}", self._model),
                Mount("/", create_app(backend)),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(("completions", body))
        if self.num_broken:
            self.num_broken -= 1
            return JSONResponse({"message": "starting"}, 503)
        if body.get("temperature", 1) < 0:
            return JSONResponse({"object": "error", "message": "too cold", "code": 400}, 400)
        if body.get("stream"):
            return StreamingResponse(self._chunks(), media_type="text/event-stream")
        if self.hangs:
            await self.released.wait()
        return JSONResponse({**_text("two three", "stop"), "metadata": VERSIONS}, headers={"x-engine": "1"})

    async def _chunks(self) -> AsyncIterator[str]:
        yield f"data: {json.dumps({**_text('two', None), 'metadata': VERSIONS})}\n\n"
        if self.hangs:
            await self.released.wait()
        yield f"data: {json.dumps(_text(' three', 'stop'))}\n\n"
        yield "data: [DONE]\n\n"

    async def _embed(self, request: Request) -> Response:
        self.asked.append(("embeddings", await request.json()))
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        usage = {"prompt_tokens": 2, "total_tokens": 2}
        return JSONResponse({"object": "list", "model": "m", "data": data, "usage": usage})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != "org/m":
            return JSONResponse({"error": {"message": f"The model '{name}' does not exist"}}, 404)
        return JSONResponse({"id": name, "object": "model", "created": 7, "owned_by": "sglang"})


def _text(text: str, finish_reason: str | None) -> Json:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "c-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texts() -> AsyncIterator[tuple[TextEngine, GatewayAt]]:
    engine = TextEngine()
    async with serve_app(engine.app) as port, gateway_before(f"http://127.0.0.1:{port}") as gateway:
        yield engine, gateway
        engine.released.set()
        engine.backend.stop_all()


@asynccontextmanager
async def opened(texts: tuple[TextEngine, GatewayAt], **fields: Any) -> AsyncIterator[tuple[TextEngine, OpenedAt]]:
    """A new rollout."""
    engine, gateway = texts
    engine.asked, engine.hangs, engine.num_broken, engine.released = [], False, 0, asyncio.Event()
    engine.backend.aborts.clear()
    yield engine, await gateway.open(f"r-{id(fields)}", **fields)
    engine.released.set()


async def test_text_completions_are_passed_on_unrecorded(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts, max_tokens=64, sampling_params={"temperature": 0.5}) as (engine, rollout):
        async with rollout.client() as client:
            whole = await client.completions.create(model="m", prompt="one", max_tokens=99, logprobs=1)
            stream = await client.completions.create(model="m", prompt="one", stream=True)
            parts = [chunk.choices[0].text async for chunk in stream]
        told = await rollout.close()
    assert (whole.choices[0].text, parts) == ("two three", ["two", " three"])
    sent = [body for _, body in engine.asked]
    assert [body["max_tokens"] for body in sent] == [64, 64]
    assert [body["temperature"] for body in sent] == [0.5, 0.5]
    assert sent[0]["rid"].startswith("fb-")
    assert sent[0]["rid"] != sent[1]["rid"]
    assert (told["samples"], told["num_calls"]) == ([], 2)
    assert told["notes"] == {"unrecorded_completions": 2}
    assert told["failures"] == []


async def test_embeddings_are_passed_on(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts) as (engine, rollout):
        async with rollout.client() as client:
            made = await client.embeddings.create(model="m", input=["one"], encoding_format="float")
        assert made.data[0].embedding == [0.5, 0.25]
        assert (await rollout.close())["notes"] == {"unrecorded_embeddings": 1}
    assert engine.asked[0][1]["input"] == ["one"]
    assert "max_tokens" not in engine.asked[0][1]


async def test_prompts_in_token_ids_are_refused_there_as_well(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts) as (engine, rollout):
        for path, field in (("completions", "prompt"), ("embeddings", "input")):
            for ids in ([10**6], [[1, 2], [10**6]], ["text", [3]]):
                reply = await rollout.post(path, {"model": "m", field: ids})
                error = reply.json()["error"]
                assert (reply.status_code, error["code"], error["param"]) == (400, "input_ids_refused", field)
    assert engine.asked == []


async def test_the_engines_error_and_its_headers_come_as_they_are(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts) as (_, rollout):
        refused = await rollout.post("completions", {"model": "m", "prompt": "one", "temperature": -1})
        assert (refused.status_code, refused.json()["message"]) == (400, "too cold")
        answered = await rollout.post("completions", {"model": "m", "prompt": "one"})
        assert (answered.headers["x-engine"], "x-forebay-rollout-id" in answered.headers) == ("1", True)
        assert [failure["kind"] for failure in (await rollout.close())["failures"]] == ["agent"]


async def test_an_engine_that_is_starting_is_waited_for(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts) as (engine, rollout):
        engine.num_broken = 1
        assert (await rollout.post("completions", {"model": "m", "prompt": "one"})).status_code == 200
    assert len(engine.asked) == 2


async def test_another_engine_is_asked_while_one_is_starting() -> None:
    starting, other = TextEngine(), TextEngine()
    starting.num_broken = 1_000_000
    async with (
        asyncio.timeout(LIMIT_S),
        serve_app(starting.app) as starting_port,
        serve_app(other.app) as other_port,
        gateway_before(*(f"http://127.0.0.1:{port}" for port in (starting_port, other_port))) as gateway,
    ):
        for number in range(2):  # one of both rollouts begins with the engine that is starting
            rollout = await gateway.open(f"r-{number}")
            reply = await rollout.post("completions", {"model": "m", "prompt": "one"})
            assert reply.json()["choices"][0]["text"] == "two three"
    assert (len(starting.asked), len(other.asked)) == (1, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_key_the_deadline_and_the_end_hold(texts: tuple[TextEngine, GatewayAt], stream: bool) -> None:
    body = {"model": "m", "prompt": "one", "stream": stream}
    async with opened(texts) as (engine, rollout):
        assert (await rollout.post("completions", body, key="none")).status_code == 401
        assert engine.asked == []
        engine.hangs = True
        asking = asyncio.create_task(rollout.post("completions", body))
        await eventually(lambda: len(engine.asked) == 1)
        await rollout.close()
        assert "rollout_over" in (await asking).text
        rid = engine.asked[0][1]["rid"]
        await eventually(lambda: any(rid.startswith(prefix) for prefix in engine.backend.aborts))
    async with opened(texts, deadline_s=0.3) as (engine, rollout):
        engine.hangs = True
        assert "rollout_over" in (await rollout.post("completions", body)).text


async def test_an_agent_that_goes_away_ends_its_completion(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts) as (engine, rollout):
        engine.hangs = True
        asking = asyncio.create_task(rollout.post("completions", {"model": "m", "prompt": "one"}))
        await eventually(lambda: len(engine.asked) == 1)
        asking.cancel()
        await eventually(lambda: engine.asked[0][1]["rid"] in engine.backend.aborts)


async def test_numbers_in_the_metadata_of_a_reply_are_left_out(texts: tuple[TextEngine, GatewayAt]) -> None:
    async with opened(texts) as (_, rollout):
        whole = await rollout.post("completions", {"model": "m", "prompt": "one"})
        assert whole.json()["metadata"] == {"weight_version": "v1"}
        streamed = await rollout.post("completions", {"model": "m", "prompt": "one", "stream": True})
        first = json.loads(streamed.text.splitlines()[0].removeprefix("data: "))
        assert first["metadata"] == {"weight_version": "v1"}


async def test_so_are_those_of_a_chat_and_of_a_response(stage: Stage) -> None:
    stage("4")
    rollout = await stage.open()
    answer = await rollout.chat()
    assert answer["metadata"] == {"weight_version": "default"}
    asked = {"model": "m", "input": "hi", "metadata": {"turn": 3, "task": "7"}}
    for stream in (False, True):
        reply = await rollout.post("responses", {**asked, "stream": stream})
        assert reply.status_code == 200
        assert reply.text.count('"metadata":{"task":"7"}') >= 1
        assert '"turn"' not in reply.text
    assert_whole((await rollout.close())["samples"][0])


async def test_a_model_is_told_in_both_protocols(texts: tuple[TextEngine, GatewayAt]) -> None:
    import anthropic

    async with opened(texts) as (_, rollout):
        async with rollout.client() as client:
            assert [model.id async for model in client.models.list()] == ["scripted"]
            assert (await client.models.retrieve("org/m")).owned_by == "sglang"
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.models.retrieve("none")
        claude = anthropic.AsyncAnthropic(base_url=rollout.anthropic_url, api_key=rollout.key, max_retries=0)
        async with claude:
            (listed,) = [model async for model in claude.models.list()]
            assert (listed.id, listed.type, listed.display_name) == ("scripted", "model", "scripted")
            assert listed.created_at is not None
            assert (await claude.models.retrieve("org/m")).created_at.year == 1970
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await claude.models.retrieve("none")


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_need_no_version_in_the_path(stage: Stage, stream: bool) -> None:
    stage("four")
    rollout = await stage.open()
    asked = {"model": "m", "max_tokens": 9, "messages": [USER]}
    headers = {"x-api-key": rollout.key}
    http = stage.gateway.http
    reply = await http.post(f"{rollout.anthropic_url}/messages", json={**asked, "stream": stream}, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "four" in reply.text
    counted = await http.post(f"{rollout.anthropic_url}/messages/count_tokens", json=asked, headers=headers)
    assert counted.json()["input_tokens"] > 0
    listed = await http.get(f"{rollout.anthropic_url}/models", headers=headers)
    assert listed.json()["data"][0]["id"] == "scripted"
    assert_whole((await rollout.close())["samples"][0])
