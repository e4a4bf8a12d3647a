"""A line between clients and a server: it tells what was asked, and can keep the end of a reply to itself."""

import socket
import threading
from contextlib import ExitStack, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Self
from urllib.parse import urlsplit

from tests.kit import poll_until
from tests.serving import in_thread


class Relay:
    """Passes bytes on, and the end of a connection too, unlike ``FaultyProxy``. Enter it to serve."""

    def __init__(self, target: str) -> None:
        self._target = ("127.0.0.1", int(urlsplit(target).port or 0))
        self._asked: list[bytes] = []
        self._to_keep = b""
        self._has_kept = threading.Event()
        self._stack = ExitStack()

    def wait_for(self, text: bytes) -> None:
        """Until a request with ``text`` went to the server."""
        poll_until(lambda: any(text in asked for asked in self._asked))

    def keep_end_of(self, text: bytes) -> None:
        """Of the next reply with ``text``, no more than a half arrives; the server does not notice."""
        self._has_kept.clear()
        self._to_keep = text

    def wait_until_kept(self) -> None:
        """Until half a reply has gone to its client."""
        assert self._has_kept.wait(20)

    def __enter__(self) -> Self:
        relay = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                relay._serve(self.request)

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._stack.enter_context(in_thread(self._server))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _serve(self, client: socket.socket) -> None:
        with socket.create_connection(self._target) as server, suppress(OSError):
            down = threading.Thread(target=self._pass_replies, args=(server, client))
            down.start()
            try:
                while data := client.recv(65536):
                    server.sendall(data)
                    self._asked.append(data)
            finally:
                server.shutdown(socket.SHUT_RDWR)
                down.join()

    def _pass_replies(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if self._to_keep and self._to_keep in data:
                    self._to_keep = b""
                    client.sendall(data[: len(data) // 2])
                    self._has_kept.set()
                    return
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
