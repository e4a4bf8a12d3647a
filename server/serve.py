"""Running the server: a socket first, so that its address is known before anything starts."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn
import uvloop

from forebay.core.errors import InvalidInput
from forebay.core.settings import Settings
from forebay.server.app import create_app, open_services
from forebay.server.direct_send import http_protocol
from forebay.server.process_limits import allow_many_files, keep_freed_memory
from forebay.server.services import Services
from forebay.server.sockets import bind, url_of
from forebay.server.stalled_clients import Connection, end_calls

logger = logging.getLogger(__name__)


def listen(settings: Settings) -> socket.socket:
    """Bind the address of ``settings``. Raises ``InvalidInput`` if it would be open to others without a token."""
    if not (settings.is_loopback or settings.token or settings.insecure):
        raise InvalidInput(
            f"listening on {settings.host} would let anybody who reaches it write, read and start code",
            hint="set FOREBAY_TOKEN, or pass --insecure on a network that you trust",
            field="host",
        )
    return bind(settings.host, settings.port)


def serve(settings: Settings, bound: socket.socket, when_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM: end long polls, finish requests, end run processes, write everything down.

    Returns after SIGTERM; raises ``KeyboardInterrupt`` after SIGINT, ``StorageFailed`` if the data cannot be opened.
    """
    keep_freed_memory()
    allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, bound, when_ready))


async def _serve(settings: Settings, bound: socket.socket, when_ready: Callable[[str], None]) -> None:
    url = url_of(bound)
    async with open_services(settings, url) as services:
        config = uvicorn.Config(
            create_app(services),
            log_config=None,
            access_log=False,
            http=http_protocol(),
            ws="none",
            lifespan="off",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=10,
        )
        await _Server(config, services, lambda: when_ready(url)).serve(sockets=[bound])
    logger.info("run processes have ended, and everything is written down")


def calm_collector() -> None:
    """Let the cyclic collector run seldom: at its defaults it walks the whole backlog again and again.

    Samples and groups form no cycles; measured on 4 KB writes, this saves a sixth of the server's CPU.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 1_000)


class _Server(uvicorn.Server):
    """Starts runs once it listens, and ends long polls before it waits for requests to end."""

    def __init__(self, config: uvicorn.Config, services: Services, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._services = services
        self._when_ready = when_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._services.runs.resume_all()
        calm_collector()
        self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.buffer.end_waits()
        ending = asyncio.create_task(end_calls(cast("set[Connection]", self.server_state.connections)))
        await super().shutdown(sockets)
        ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A server that was asked to end by SIGTERM ended well: uvicorn would raise the signal once more."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)
