"""Engines as a server sees them while their weights change: a worker that can be told to fail, and a router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.web.serving import serve_app
from tests.kit import Json


class Worker:
    """The administrative routes of an SGLang server. ``told`` holds what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.url = ""
        self.refusal = ""
        """Says no to weights, with this message."""
        self.loads = asyncio.Event()
        """Cleared, it takes no weights until it is set."""
        self.loads.set()
        self.is_silent = False
        """Does not go on when it is told to: 503."""
        self.changed = asyncio.Condition()

    async def wait_told(self, what: str, times: int = 1) -> None:
        """Until it was told ``what`` so many times."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: self.told.count(what) >= times)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Worker"]:
        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST"])]
        async with serve_app(Starlette(routes=routes)) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield self

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path == "/model_info":
            return JSONResponse({"model_path": "/first", "weight_version": "0"})
        if path == "/v1/loads":
            return JSONResponse({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
        if path == "/workers":
            return Response(status_code=404)
        await self._note(path)
        if path == "/continue_generation" and self.is_silent:
            return Response(status_code=503)
        if path == "/update_weights_from_disk":
            await self.loads.wait()
            return JSONResponse({"success": not self.refusal, "message": self.refusal}, 400 if self.refusal else 200)
        return JSONResponse({"success": True})

    async def _note(self, path: str) -> None:
        async with self.changed:
            self.told.append(path)
            self.changed.notify_all()


@asynccontextmanager
async def router_before(*urls: str) -> AsyncIterator[str]:
    """A router that lists workers and knows nothing else; its address."""
    listed: list[Json] = [{"url": url, "connection_mode": "http", "worker_type": "regular"} for url in urls]

    async def workers(_: Request) -> Response:
        return JSONResponse({"workers": listed})

    async with serve_app(Starlette(routes=[Route("/workers", workers)])) as port:
        yield f"http://127.0.0.1:{port}"
