"""A stand-in for the SGLang router: it lists workers, drops what it does not know of a chat, and knows no aborts."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.web.serving import serve_app
from tests.kit import TIME_LIMIT_S


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
        async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
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
def free_port() -> Iterator[int]:
    """A loopback port that nobody else is given during the test, and on which nobody listens as long as it does not."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's, which binds it too
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


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
def serve_status() -> Any:
    """A factory: ``async with serve_status(status) as url``, which answers everything with that status."""

    @asynccontextmanager
    async def serve(status: int) -> AsyncIterator[str]:
        async def answer(_: Request) -> Response:
            return Response(status_code=status)

        async with serve_app(Starlette(routes=[Route("/{path:path}", answer)])) as port:
            yield f"http://127.0.0.1:{port}"

    return serve
