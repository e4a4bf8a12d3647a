"""Connections to engines: one for each call under way, used again, and gone when they are closed."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import httpx2
import openai
import pytest
from openai._models import FinalRequestOptions

from forebay.engines.connections import EngineConnections
from forebay.engines.router_workers import admin_client
from forebay.generators.rollouts.client import UNBOUND_URL, make_async_client, make_client
from forebay.generators.rollouts.connections import RolloutConnections, ThreadConnections
from tests.kit import TIME_LIMIT_S
from tests.serving import in_thread

AT_ONCE = 24

Client = httpx.AsyncClient | httpx2.AsyncClient


def client_of_forebay() -> httpx.AsyncClient:
    """As administrative calls have it."""
    return httpx.AsyncClient(transport=EngineConnections(), timeout=TIME_LIMIT_S)


def client_of_openai() -> httpx2.AsyncClient:
    """As the ``openai`` clients of rollouts have it."""
    return httpx2.AsyncClient(transport=RolloutConnections(), timeout=TIME_LIMIT_S)


each_client = pytest.mark.parametrize("make", [client_of_forebay, client_of_openai])


class Server(ThreadingHTTPServer):
    """Answers nothing before ``expected`` requests are there at once, and counts its connections."""

    daemon_threads = True
    request_queue_size = 2 * AT_ONCE

    def __init__(self) -> None:
        self.num_connections = 0
        self.seen: list[str] = []
        self.is_asked = threading.Event()
        self.barrier = threading.Barrier(1)
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        self.server.num_connections += 1
        super().setup()

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        barrier = self.server.barrier
        self.server.is_asked.set()
        barrier.wait(TIME_LIMIT_S)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    with in_thread(server):
        try:
            yield server
        finally:
            server.barrier.abort()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


async def ask_at_once(http: Client, server: Server, num: int) -> None:
    server.barrier = threading.Barrier(num)
    replies = await asyncio.gather(*(http.get(server.url) for _ in range(num)))
    assert {reply.status_code for reply in replies} == {200}


@each_client
async def test_each_call_under_way_has_a_connection_and_later_ones_use_them_again(
    server: Server, make: Callable[[], Client]
) -> None:
    async with make() as http:
        for _ in range(3):
            await ask_at_once(http, server, AT_ONCE)
        assert server.num_connections == AT_ONCE


def test_threads_share_connections_as_well(server: Server) -> None:
    with (
        httpx2.Client(transport=ThreadConnections(), timeout=TIME_LIMIT_S) as http,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for _ in range(3):
            server.barrier = threading.Barrier(AT_ONCE)
            assert {reply.status_code for reply in pool.map(http.get, [server.url] * AT_ONCE)} == {200}
        assert server.num_connections == AT_ONCE


@each_client
async def test_each_server_has_its_own_connections(server: Server, make: Callable[[], Client]) -> None:
    with serving() as other:
        async with make() as http:
            for _ in range(3):
                await ask_at_once(http, server, 2)
                await ask_at_once(http, other, 1)
        assert (server.num_connections, other.num_connections) == (2, 1)


@each_client
async def test_a_cancelled_call_leaves_no_broken_connection_behind(server: Server, make: Callable[[], Client]) -> None:
    async with make() as http:
        server.barrier = threading.Barrier(2)
        call = asyncio.create_task(http.get(server.url))
        assert await asyncio.to_thread(server.is_asked.wait, TIME_LIMIT_S)
        call.cancel()
        await asyncio.wait([call])
        server.barrier.abort()
        await ask_at_once(http, server, 2)


@each_client
async def test_closing_ends_the_calls_under_way(server: Server, make: Callable[[], Client]) -> None:
    server.barrier = threading.Barrier(2)
    http = make()
    asked = asyncio.create_task(http.get(server.url))
    await asyncio.to_thread(server.is_asked.wait, TIME_LIMIT_S)
    await http.aclose()
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx2.ReadError, httpx2.RemoteProtocolError)):
        await asked


async def test_a_proxy_of_the_environment_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    async with admin_client(None) as http, make_async_client(None) as async_client:
        await http.get("http://engine.invalid/admin")
        await openai.AsyncOpenAI.request(async_client, object, FinalRequestOptions(method="get", url="/async"))
    with make_client(None) as client:
        openai.OpenAI.request(client, object, FinalRequestOptions(method="get", url="/threads"))
    assert server.seen == ["http://engine.invalid/admin", f"{UNBOUND_URL}/async", f"{UNBOUND_URL}/threads"]
