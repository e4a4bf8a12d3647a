"""Clients that take nothing of their reply any more, or send nothing of their request: stopped, or out of reach.

The kernel counts what the client's side has taken and sent. So nothing is counted or timed here while a reply is sent.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Protocol, Self

from starlette.types import Scope

from forebay.server.direct_send import DirectBody, direct_body, duplicate
from forebay.web.http_protocol import awaits_body, connection_of, num_bytes_in_kernel

STANDSTILL_S = 1.0
"""How long a request or a reply may stand still once the server is ending."""
NUM_LAST_LOOKS = 5
"""So many times it is looked then; whatever has not gone out is ended, before uvicorn does it with a traceback."""
_COUNTS = struct.Struct("=120xQQ")
"""``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux' ``tcp_info``."""


class Connection(Protocol):
    """What the server has of one."""

    transport: asyncio.Transport


class ClientProgress:
    """What a client takes from its socket, and what it sends; ``close`` it when it is of no interest any more."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._socket = duplicate(transport)
        self._num_taken, self._num_sent = self._count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Look no more; the connection stays as it is."""
        self._socket.close()

    @property
    def has_more(self) -> bool:
        """Whether there is something that the client could take."""
        return num_bytes_in_kernel(self._socket.fileno()) > 0

    def has_moved(self) -> bool:
        """Whether the client has taken something since this was last asked, or there is nothing for it to take.

        True as well where the kernel does not count: a healthy reply must never be taken for one that stands still.
        """
        before, (self._num_taken, _) = self._num_taken, self._count()
        return not self._num_taken or self._num_taken != before or not self.has_more

    def has_sent(self) -> bool:
        """Whether the client has sent something since this was last asked; true as well where nothing is counted."""
        before, (_, self._num_sent) = self._num_sent, self._count()
        return not self._num_sent or self._num_sent != before

    def _count(self) -> tuple[int, int]:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        return _COUNTS.unpack(info) if len(info) == _COUNTS.size else (0, 0)

    def break_off(self) -> None:
        """End the connection at once. Whoever is sending over it, past the framework or not, gets an error."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._transport.abort()


class Watch:
    """Sees that a reply goes on, and that its connection ends if it does not: with one timer, however long it is.

    ``patience_s`` is given for how many seconds the reply has stood still, and says for how many more it may. A reply
    that is left before its end is broken off too, since nothing else could follow on its connection.
    """

    def __init__(self, body: DirectBody, client: "asyncio.Task[None]", patience_s: Callable[[float], float]) -> None:
        self._body = body
        self._client = client
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._progress = ClientProgress(body.transport)
        self._moved_at_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._client.add_done_callback(self._break_off)
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.remove_done_callback(self._break_off)
        if self._timer is not None:
            self._timer.cancel()
        if not self._body.is_complete:  # the client would take the next reply on the connection for the rest of this
            self._break_off()
        self._progress.close()

    def _look(self) -> None:
        if self._progress.has_moved():
            self._moved_at_s = self._loop.time()
        self._wait()

    def _wait(self) -> None:
        left_s = self._patience_s(self._loop.time() - self._moved_at_s)
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._break_off()

    def _break_off(self, _client: object = None) -> None:
        self._progress.break_off()
        self._body.note_disconnect()


def watched(
    scope: Scope, client: "asyncio.Task[None]", patience_s: Callable[[float], float]
) -> AbstractContextManager[object]:
    """Within it, a reply that stands still is broken off, and so is one that is left before its end.

    ``client`` is done when the client is gone; for ``patience_s`` see ``Watch``. It does nothing for a server without
    a ``DirectBody``.
    """
    body, connection = direct_body(scope), connection_of(scope)
    if body is None or connection is None or body.is_over:
        return nullcontext()
    connection.is_watched = True
    return Watch(body, client, patience_s)


async def end_calls(connections: Collection[Connection]) -> None:
    """While a server ends: break off calls that stand still, and in the end those that are still under way."""
    for _ in range(NUM_LAST_LOOKS):
        with _unfinished(connections) as calls:
            await asyncio.sleep(STANDSTILL_S)
            for each, progress in calls:
                # A client that is sending is asked for what it sends; a slow one that moves is given all the looks.
                if not (progress.has_sent() if awaits_body(each) else progress.has_moved()):
                    progress.break_off()
    with _unfinished(connections) as calls:
        for _, progress in calls:
            progress.break_off()


@contextmanager
def _unfinished(connections: Collection[Connection]) -> Iterator[list[tuple[Connection, ClientProgress]]]:
    """The connections whose client could send or take something now; the others are not held open."""
    with ExitStack() as stack:
        found = []
        for each in connections:
            try:  # also where the server has closed already: what it wrote before may still wait for the client
                progress = ClientProgress(each.transport)
            except OSError:  # it has ended
                continue
            if progress.has_more or awaits_body(each):
                found.append((each, stack.enter_context(progress)))
            else:
                progress.close()
        yield found
