"""Aborts by prefix against a front that knows exact ids only, the dead, and those that know no aborts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.engines.aborts import abort_prefix
from forebay.web.serving import serve_app
from tests.kit import TIME_LIMIT_S


class ExactFront:
    """SGLang 0.5.23 as it behaves: the front wants an exact id in flight, the scheduler then matches by prefix."""

    def __init__(self, rids: set[str]) -> None:
        self.running = rids
        self.marks: list[str] = []
        self._ended = asyncio.Condition()
        self.app = Starlette(
            routes=[
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/v1/loads", self._loads),
            ]
        )

    async def _abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        if rid in self.running:
            async with self._ended:
                self.running = {other for other in self.running if not other.startswith(rid)}
                self._ended.notify_all()
        return Response()

    async def _generate(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.marks.append(rid)
        self.running.add(rid)
        async with self._ended:
            await self._ended.wait_for(lambda: rid not in self.running)
        return JSONResponse({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})

    async def _loads(self, _: Request) -> Response:
        return JSONResponse({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]})


@asynccontextmanager
async def exact_front(*rids: str) -> AsyncIterator[tuple[ExactFront, str]]:
    front = ExactFront(set(rids))
    async with serve_app(front.app) as port:
        yield front, f"http://127.0.0.1:{port}"


async def test_prefix_reaches_a_scheduler_whose_front_wants_exact_ids() -> None:
    async with exact_front("fb-a-0", "fb-a-1") as (front, url):
        assert await abort_prefix(url, "fb-a-", timeout_s=TIME_LIMIT_S) == 1
        assert front.running == set()
        assert front.marks == ["fb-a-"]


async def test_others_calls_are_left_alone_and_time_is_kept() -> None:
    async with exact_front("fb-a-0", "fb-b-0") as (front, url), asyncio.timeout(TIME_LIMIT_S):
        assert await abort_prefix(url, "fb-a-", timeout_s=5) == 1
        assert "fb-b-0" in front.running
        assert "fb-a-0" not in front.running


async def test_behind_a_router_every_worker_is_told(serve_router: Any) -> None:
    async with exact_front("fb-a-0") as (one, one_url), exact_front("fb-a-1") as (two, two_url):
        async with serve_router([one_url, two_url]) as (router, url):
            # A worker that fails its health check may still be generating.
            router.workers[1]["is_healthy"] = False
            assert await abort_prefix(url, "fb-a-", timeout_s=TIME_LIMIT_S) == 2
        assert one.running == two.running == set()


async def test_dead_worker_does_not_keep_the_others_from_being_told(serve_router: Any, free_port: int) -> None:
    async with exact_front("fb-a-0") as (front, alive):
        async with serve_router([f"http://127.0.0.1:{free_port}", alive]) as (_, url):
            assert await abort_prefix(url, "fb-a-", timeout_s=TIME_LIMIT_S) == 1
        assert front.running == set()


async def test_engine_without_aborts_is_harmless(serve_json: Any) -> None:
    async with serve_json({"/v1/models": {"data": []}}) as url:
        assert await abort_prefix(url, "fb-a-") is None


async def test_silent_engine_is_left_after_the_time_limit() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, asyncio.timeout(TIME_LIMIT_S):
        assert (
            await abort_prefix(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "fb-", timeout_s=0.3) is None
        )
        await gone.wait()
