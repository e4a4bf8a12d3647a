"""A stand-in for the SGLang router: it lists workers, drops what it does not know of a chat, and knows no aborts."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.web.serving import serve_app


class FakeRouter:
    """Its ``workers`` may be changed while it serves."""

    def __init__(self, urls: list[str]) -> None:
        self.workers: list[dict[str, Any]] = [self.listed(url) for url in urls]
        self.chats = 0
        self.listings = 0
        self.app = Starlette(
            routes=[Route("/workers", self._list), Route("/v1/chat/completions", self._chat, methods=["POST"])]
        )

    @staticmethod
    def listed(url: str, **other: Any) -> dict[str, Any]:
        """A row of ``GET /workers`` with the fields that sglang-router 0.3.2 gives."""
        return {"url": url, "is_healthy": True, "worker_type": "regular", "connection_mode": "HTTP", **other}

    async def _list(self, _: Request) -> Response:
        self.listings += 1
        return JSONResponse({"workers": self.workers, "total": len(self.workers)})

    async def _chat(self, request: Request) -> Response:
        self.chats += 1
        body = await request.json()
        body.pop("rid", None)
        async with httpx.AsyncClient() as http:
            reply = await http.post(self.workers[0]["url"] + "/v1/chat/completions", json=body)
        return Response(reply.content, reply.status_code, media_type="application/json")


@pytest.fixture
def serve_router() -> Any:
    """A factory: ``async with serve_router(urls) as (router, url)``."""

    @asynccontextmanager
    async def serve(urls: list[str]) -> AsyncIterator[tuple[FakeRouter, str]]:
        router = FakeRouter(urls)
        async with serve_app(router.app) as port:
            yield router, f"http://127.0.0.1:{port}"

    return serve


@pytest.fixture
def free_port() -> int:
    """A loopback port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve_json() -> Any:
    """A factory: ``async with serve_json({path: body}) as url``; any other path is a 404."""

    @asynccontextmanager
    async def serve(bodies: dict[str, Any]) -> AsyncIterator[str]:
        async def answer(request: Request) -> Response:
            path = request.url.path
            return JSONResponse(bodies[path]) if path in bodies else JSONResponse({"detail": "Not Found"}, 404)

        app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
        async with serve_app(app) as port:
            yield f"http://127.0.0.1:{port}"

    return serve


@pytest.fixture
def serve_counting() -> Any:
    """A factory: ``async with serve_counting(status) as (counter, url)``, with ``counter["most_at_once"]`` requests."""

    @asynccontextmanager
    async def serve(status: int) -> AsyncIterator[tuple[dict[str, int], str]]:
        counter = {"now": 0, "most_at_once": 0}

        async def answer(_: Request) -> Response:
            counter["now"] += 1
            counter["most_at_once"] = max(counter["now"], counter["most_at_once"])
            await asyncio.sleep(0)
            counter["now"] -= 1
            return Response(status_code=status)

        async with serve_app(Starlette(routes=[Route("/{path:path}", answer)])) as port:
            yield counter, f"http://127.0.0.1:{port}"

    return serve
