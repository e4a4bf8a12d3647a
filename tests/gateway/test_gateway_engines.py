"""Engines that are gone, come back, or have too much to do."""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.web.serving import serve_app
from tests.engines.fake_vllm import RenderLater
from tests.gateway.gateway_kit import LIMIT_S, USER, assert_whole, eventually, gateway_before


async def test_an_engine_that_is_killed_and_comes_back_is_waited_for() -> None:
    engine = ScriptedEngine(lambda _: "4")
    async with AsyncExitStack() as up:
        await up.enter_async_context(engine)
        async with gateway_before(engine.url) as gateway:
            rollout = await gateway.open()
            first = await rollout.chat()
            await up.aclose()
            asking = asyncio.create_task(rollout.chat(USER, first["choices"][0]["message"], USER))
            await eventually(lambda: {"waiting_for_engine": True, "is_gateway": True} in gateway.buffer.reports)
            assert not asking.done()
            async with engine:
                await asking
                told = await rollout.close()
    assert_whole(told["samples"][-1])
    assert (told["num_calls"], told["failures"]) == (2, [])
    assert {"waiting_for_engine": False, "is_gateway": True} in gateway.buffer.reports


async def test_a_call_that_no_engine_answers_in_time_is_a_failure_of_the_engine() -> None:
    async with gateway_before("http://127.0.0.1:1") as gateway:
        rollout = await gateway.open(deadline_s=0.3)
        reply = await rollout.post("chat/completions", {"messages": [USER]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (410, "rollout_over")
        told = await rollout.close()
    assert [failure["kind"] for failure in told["failures"]] == ["engine"]
    assert told["samples"] == []


async def test_a_rollout_stays_on_its_engine_and_another_takes_over_when_it_is_gone() -> None:
    async with AsyncExitStack() as first_up, ScriptedEngine(lambda _: "second") as second:
        first = await first_up.enter_async_context(ScriptedEngine(lambda _: "first"))
        async with gateway_before(first.url, second.url) as gateway:
            rollouts = [await gateway.open(f"r{n}") for n in range(4)]
            for _ in range(3):
                await asyncio.gather(*(rollout.chat() for rollout in rollouts))
            by_rollout = [Counter(call.rid[:-4] for call in engine.calls if call.rid) for engine in (first, second)]
            assert not by_rollout[0].keys() & by_rollout[1].keys()
            assert [*by_rollout[0].values(), *by_rollout[1].values()] == [3] * 4
            await first_up.aclose()
            await asyncio.gather(*(rollout.chat() for rollout in rollouts))
            assert len(second.calls) == 12 - len(first.calls) + 4


async def test_an_overloaded_engine_hands_a_rollout_over() -> None:
    one, other = [ScriptedEngine(lambda _: Reply(hang=True)) for _ in range(2)]
    async with one, other, gateway_before(one.url, other.url) as gateway:
        rollout = await gateway.open()
        body = {"messages": [USER]}
        calls = [asyncio.create_task(rollout.post("chat/completions", body)) for _ in range(24)]
        await eventually(lambda: one.in_flight + other.in_flight == 24)
        assert min(one.in_flight, other.in_flight) >= 4
        await rollout.close()
        assert {(await call).status_code for call in calls} == {410}


class Breaking:
    """An engine whose connections end: before a reply, or in the middle of a stream."""

    def __init__(self, num_broken: int) -> None:
        self.num_asked = 0
        self._left = num_broken
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        self.num_asked += 1
        body = await request.json()
        self._left -= 1
        message = {"role": "assistant", "content": "four"}
        if body.get("stream"):
            return StreamingResponse(self._events(message), media_type="text/event-stream")
        whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return StreamingResponse(self._parts(json.dumps(whole)), media_type="application/json")

    async def _parts(self, text: str) -> Any:
        if self._left >= 0:
            yield text[:5]
            raise ConnectionResetError
        yield text

    async def _events(self, message: Any) -> Any:
        yield _event({**message, "content": "fo"}, None)
        if self._left >= 0:
            raise ConnectionResetError
        yield _event({"content": "ur"}, "stop")
        yield "data: [DONE]\n\n"


def _event(delta: Any, finish_reason: str | None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"


@pytest.mark.parametrize(("num_broken", "status"), [(2, 200), (9, 502)])
async def test_a_whole_reply_that_breaks_off_is_asked_for_again_but_not_for_ever(num_broken: int, status: int) -> None:
    engine = Breaking(num_broken)
    async with serve_app(engine.app) as port, gateway_before(f"http://127.0.0.1:{port}") as gateway:
        rollout = await gateway.open()
        reply = await rollout.post("chat/completions", {"messages": [USER]})
        told = await rollout.close()
    assert (reply.status_code, engine.num_asked) == (status, 3)
    assert len(told["failures"]) == (status == 502)
    assert [sample.get("retokenized") for sample in told["samples"]] == [True] * (status == 200)


async def test_a_stream_that_breaks_off_after_its_first_chunk_ends_with_an_error() -> None:
    engine = Breaking(1)
    async with serve_app(engine.app) as port, gateway_before(f"http://127.0.0.1:{port}") as gateway:
        rollout = await gateway.open()
        reply = await rollout.post("chat/completions", {"messages": [USER], "stream": True})
        again = await rollout.post("chat/completions", {"messages": [USER], "stream": True})
        told = await rollout.close()
    assert "engine_lost" in reply.text
    assert "engine_lost" not in again.text
    assert engine.num_asked == 2
    assert [failure["kind"] for failure in told["failures"]] == ["engine"]
    assert len(told["samples"]) == 1


async def test_an_engine_that_is_starting_is_waited_for() -> None:
    async with ScriptedEngine(lambda _: "4") as engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        await rollout.chat()
        engine.available = False
        asking = asyncio.create_task(rollout.chat())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asking), 0.3)
        engine.available = True
        await asyncio.wait_for(asking, LIMIT_S)


class FullEngine(ScriptedEngine):
    """Its queue is full after its first chat: it refuses the others with 503. Everything else is answered."""

    num_refused = 0

    def _face(self) -> ASGIApp:
        face = super()._face()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            is_refused = bool(self.calls) and scope["path"].endswith("/chat/completions")
            self.num_refused += is_refused
            await (JSONResponse({}, 503) if is_refused else face)(scope, receive, send)

        return answer


async def test_an_agent_that_gives_up_between_two_attempts_had_no_engine() -> None:
    async with FullEngine(lambda _: "4") as engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        await rollout.chat()
        asking = asyncio.create_task(rollout.chat())
        # The pause is at least 0.4 s long by now.
        await eventually(lambda: engine.num_refused == 4)
        asking.cancel()
        told = await rollout.close()
    assert [failure["kind"] for failure in told["failures"]] == ["environment"]


async def test_a_turn_keeps_its_tokens_when_its_continuation_is_interrupted() -> None:
    def script(call: ScriptedCall) -> Reply:
        return Reply(text="one ", finish_reason="abort") if not call.said else Reply(text="two")

    async with RenderLater(script) as engine, gateway_before(engine.url) as gateway:
        rollout = await gateway.open()
        assert (await rollout.chat())["choices"][0]["message"]["content"] == "one two"
        (sample,) = (await rollout.close())["samples"]
    assert_whole(sample)


BODIES = [
    b"no json",
    b"[1]",
    b"{}",
    b'{"messages": 3, "stream_options": "x", "n": "many"}',
    b'{"messages": [1], "stream": true, "max_tokens": "many", "rid": 3}',
    b'{"messages": [{"role": "user", "content": "2"}], "stream": "yes", "tools": 1}',
    b'{"messages": null, "stream": true, "stream_options": 3}',
]


@pytest.mark.parametrize("is_sglang", [False, True])
async def test_the_engines_errors_reach_the_agent_as_they_are(is_sglang: bool) -> None:
    async def refuse(_: Request) -> Response:
        return JSONResponse({"object": "error", "message": "no"}, 418, headers={"x-why": "tea", "retry-after": "3"})

    async def tell(_: Request) -> Response:
        told = {"model_path": "m", "object": "list", "data": [{"id": "m", "object": "model"}]}
        return JSONResponse(told, 200 if is_sglang else 404)

    routes = [Route("/v1/chat/completions", refuse, methods=["POST"]), Route("/model_info", tell)]
    async with serve_app(Starlette(routes=routes)) as port, gateway_before(f"http://127.0.0.1:{port}") as gateway:
        rollout = await gateway.open()
        headers = {"Authorization": f"Bearer {rollout.key}"}
        for body in BODIES:
            directly, through = [
                await gateway.http.post(f"{url}/chat/completions", content=body, headers=headers)
                for url in (f"http://127.0.0.1:{port}/v1", rollout.base_url)
            ]
            assert (directly.status_code, directly.content) == (through.status_code, through.content), body
            own = {"date", "server"}
            assert set(through.headers) - own == set(directly.headers) - own | {"x-forebay-rollout-id"}
        told = await rollout.close()
    assert [failure["kind"] for failure in told["failures"]] == ["agent"] * told["num_calls"]


async def test_every_call_reaches_its_engine_however_many_are_in_flight() -> None:
    """A pool with a limit would queue calls that the gateway counts as sent."""
    num_rollouts, num_calls = 8, 20
    async with ScriptedEngine(lambda _: Reply(hang=True)) as engine, gateway_before(engine.url) as gateway:
        rollouts = [await gateway.open(f"r{n}") for n in range(num_rollouts)]
        async with httpx.AsyncClient(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)) as gateway.http:
            calls = [
                asyncio.create_task(rollout.post("chat/completions", {"messages": [USER]}))
                for rollout in rollouts
                for _ in range(num_calls)
            ]
            await engine.wait_in_flight(num_rollouts * num_calls, timeout_s=LIMIT_S)
            await asyncio.gather(*(rollout.close() for rollout in rollouts))
            assert {(await call).status_code for call in calls} == {410}
