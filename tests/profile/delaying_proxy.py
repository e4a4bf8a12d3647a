"""A slow network: passes bytes on in both directions, each some time after it came."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from forebay.web.serving import entered_in_thread

CHUNK = 1 << 16


class DelayingProxy:
    """Listens on a free port; a request and its reply together take ``delay_s`` longer than at ``target``."""

    def __init__(self, target: str, delay_s: float) -> None:
        self._address = urlsplit(target)
        self._delay_s = delay_s
        self._connections: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> "DelayingProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for _ in range(3):  # a connection that arrives right now is handed over in the next steps of the loop
            await asyncio.sleep(0)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for _ in range(2):
            await asyncio.sleep(0)  # aborted connections are closed in the loop's next steps

    @contextmanager
    def in_thread(self) -> Iterator["DelayingProxy"]:
        """Serve from a thread."""
        with entered_in_thread(self, "delaying-proxy"):
            yield self

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        connection.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled before its begin

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, there_writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            await asyncio.gather(self._pass_on(reader, there_writer), self._pass_on(there, writer))
        finally:
            there_writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while part := await reader.read(CHUNK):
                loop.call_later(self._delay_s / 2, writer.write, part)
        await asyncio.sleep(self._delay_s / 2)
        writer.close()
