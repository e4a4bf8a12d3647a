"""Binds sockets before anything is served on them, and serves ASGI applications from the running event loop."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from forebay.core.errors import InvalidInput
from forebay.web.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from forebay.web.http_protocol import http_protocol

SHUTDOWN_S = 2
ACCEPTING_STEPS = 2
"""Steps of asyncio's loop between accepting a connection and notifying its protocol."""
THREAD_START_S = 30.0
"""Time limit for a start that takes milliseconds on an idle machine, and much longer on a busy one."""


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it is up, and leaves signals to the owner of the loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    # uvicorn would handle SIGINT itself, and raise it again at its end.
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, including one that arrives right now or whose client reads nothing."""
        for listening in self.servers:
            listening.close()
        for _ in range(ACCEPTING_STEPS):  # uvicorn closes only the connections that it knows of
            await asyncio.sleep(0)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # they are closed in the loop's next step


@contextmanager
def entered_in_thread(context: AbstractAsyncContextManager[object], name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """Enter ``context`` in its own thread, called ``name``; yields that thread's event loop.

    Raises here what entering or leaving the context raises, unless the block has raised something itself.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    left: Future[None] = Future()

    async def stay() -> None:
        async with context:
            stopping = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), stopping))
            await stopping.wait()

    def run() -> None:
        try:
            asyncio.run(stay())
            left.set_result(None)
        except BaseException as error:  # noqa: BLE001 - any exception: another thread waits for it
            (left if started.done() else started).set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    loop, stopping = started.result(THREAD_START_S)
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
    left.result()


@asynccontextmanager
async def serve_app(
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, limits: ConnectionLimits = DEFAULT_LIMITS
) -> AsyncIterator[int]:
    """Serve ``app`` on ``host``; yields the port (0: a free one). On exit, running calls have 2 s to finish.

    Raises ``InvalidInput`` with the reason if it cannot listen there.
    """
    listener = bind(host, port, listens=True)
    config = uvicorn.Config(
        app,
        http=http_protocol(limits),
        ws="none",
        lifespan="off",  # the caller opens and closes the parts
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


def bind(host: str, port: int, *, setting: str = "port", listens: bool = False) -> socket.socket:
    """A socket bound to ``host`` and ``port``. Raises ``InvalidInput`` that names ``setting`` if it cannot be bound.

    Two sockets can be bound to one port, but only one can listen: ``listens`` claims the port at once.
    """
    try:
        return _bound(host, port, listens)
    except (OSError, OverflowError, UnicodeError) as error:  # an invalid port number, an invalid host name
        why = (
            "ports go from 0 to 65535"
            if isinstance(error, OverflowError)
            else getattr(error, "strerror", None) or error
        )
        raise InvalidInput(
            f"port {port} of {host} cannot be used: {why}",
            hint=f"another server may be running; choose another {setting}, or 0 for a free one",
            field=setting,
        ) from None


def _bound(host: str, port: int, listens: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches off Nagle's algorithm, which would delay the second part of a reply, only if the protocol is
    # given.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A reused port may still have old connections in TIME_WAIT.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        if listens:
            bound.listen()
    except (OSError, OverflowError, UnicodeError):
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket, as processes of this machine reach it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised here, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
