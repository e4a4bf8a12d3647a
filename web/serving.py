"""Serve an ASGI application on a loopback port from the running event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

SHUTDOWN_S = 2


class _Server(uvicorn.Server):
    """uvicorn that tells when it is up, and leaves the signals to whoever runs the loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def serve_app(app: ASGIApp, *, port: int = 0) -> AsyncIterator[int]:
    """Serve ``app`` on ``127.0.0.1``; yields the port (0: a free one). At the end running calls have 2 s left."""
    listener = _listen(port)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    await server.up.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def _listen(port: int) -> socket.socket:
    # With the protocol told, asyncio switches Nagle's algorithm off, which would hold back the second part of a reply.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A port that is used again has connections of its earlier life in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        raise
    return listener
