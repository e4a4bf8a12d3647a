"""A proxy in front of a server that loses requests and replies as a test says."""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

import httpx

from tests.kit import TIME_LIMIT_S
from tests.serving import in_thread

Kind = Literal["lose request", "lose reply", "busy", "busy for long", "full"]
STATUSES = {"busy": 503, "busy for long": 503, "full": 429}


@dataclass(frozen=True)
class Seen:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FaultyProxy:
    """Passes on to ``target`` what no fault is planned for. Enter it to serve."""

    target: str
    seen: list[Seen] = field(default_factory=list)
    _faults: deque[tuple[Kind, str]] = field(default_factory=deque)
    _stack: ExitStack = field(default_factory=ExitStack)

    def plan(self, *kinds: Kind, path: str = "") -> None:
        """The next requests whose path contains ``path`` meet these faults, one each."""
        self._faults.extend((kind, path) for kind in kinds)

    @property
    def is_calm(self) -> bool:
        """Whether every planned fault has happened."""
        return not self._faults

    def requests(self, path: str) -> list[Seen]:
        """Those that came to paths that contain ``path``."""
        return [seen for seen in self.seen if path in seen.path]

    def __enter__(self) -> Self:
        self._http = self._stack.enter_context(httpx.Client(timeout=TIME_LIMIT_S))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._stack.enter_context(in_thread(self._server))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._serve(self)

            do_POST = do_PUT = do_GET  # noqa: N815 - the names that http.server asks for

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        return Handler

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        self.seen.append(Seen(handler.command, handler.path, dict(handler.headers), body))
        fault = self._next_fault(handler.path)
        if fault in STATUSES:
            told = {"Retry-After": "60" if fault == "busy for long" else "0"}
            _answer(handler, STATUSES[fault], told, b'{"error":{"code":"busy","message":"busy"}}')
            return
        reply = None if fault == "lose request" else self._forward(handler, body)
        if reply is None or fault:
            handler.close_connection = True
            return
        kept = {name: value for name, value in reply.headers.items() if name in ("content-type", "retry-after")}
        _answer(handler, reply.status_code, kept, reply.content)

    def _next_fault(self, path: str) -> Kind | None:
        if self._faults and self._faults[0][1] in path:
            return self._faults.popleft()[0]
        return None

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> httpx.Response | None:
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in ("host", "connection")}
        try:
            return self._http.request(handler.command, self.target + handler.path, content=body, headers=headers)
        except httpx.TransportError:  # the server is being restarted
            return None


def _answer(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
