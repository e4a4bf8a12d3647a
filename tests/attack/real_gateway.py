"""A gateway as a process of its own, as the server starts it, and what opens rollouts at it."""

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from forebay.core.processes.child_link import ChildLink
from forebay.gateway.spec import GatewaySpec
from forebay.web.serving import serve_app
from tests.gateway.gateway_kit import CONTROL_KEY, LIMIT_S, FakeBuffer, GatewayAt


@asynccontextmanager
async def real_gateway(engine_url: str, **settings: Any) -> AsyncIterator[GatewayAt]:
    """A gateway process with a run on this engine; ``settings`` are those of its spec."""
    buffer = FakeBuffer()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        told = {"max_body_bytes": 1 << 30, "max_bodies_bytes": 1 << 30, **settings}
        process = await ChildLink[None].start(
            *("forebay.gateway", str(listening.fileno())),
            setup=GatewaySpec(CONTROL_KEY, url, **told),
            reads=type(None),
            pass_fds=[listening.fileno()],
        )
    try:
        async with httpx.AsyncClient(timeout=LIMIT_S) as http, serve_app(buffer.app) as port:
            gateway = GatewayAt(url, http, f"http://127.0.0.1:{port}/w/key", buffer)
            await gateway.register(engine_url)
            yield gateway
            buffer.end()
    finally:
        process.signal(signal.SIGTERM)
        await process.end(LIMIT_S)
