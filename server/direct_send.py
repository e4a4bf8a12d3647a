"""Large replies: sent past the framework, from the store to the client's socket, and broken off where they stall.

Where ``web/http_protocol`` does not know the inside of the uvicorn that is installed, replies take the ordinary way.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Scope

from forebay.buffer.store.abc import Outbound, Store
from forebay.web.http_protocol import ReplyHandle, connection_of, duplicate
from forebay.web.replies import BodyPieces, ClientGone, Header, HttpReply

MAX_TURNS = 100
"""So often the event loop gets its turn before a connection that has bytes left to send is left to the framework."""


class DirectBody(ReplyHandle):
    """The way to the socket of one request, for use after the reply has been started."""

    __slots__ = ()

    async def send(self, store: Store, pieces: Sequence[Outbound], num_bytes: int) -> bool:
        """Send a part of the body, ``num_bytes`` in all; False if it must be sent in the usual way.

        Raises ``StorageFailed`` and ``ClientGone``; the reply cannot be finished then.
        """
        if not await self._is_flushed():  # what follows would overtake what the transport has not sent
            return False
        with duplicate(self.transport) as connection:
            try:
                if not await store.send(pieces, connection):
                    return False
            except ConnectionError as error:
                raise ClientGone from error
        self.note_sent(num_bytes)
        return True

    async def _is_flushed(self) -> bool:
        """Whether everything that was written before is with the kernel."""
        for _ in range(MAX_TURNS):
            if self.is_over:
                return False
            if not self.transport.get_write_buffer_size():
                return True
            await asyncio.sleep(0)  # uvloop writes at the end of a turn
        return False


def direct_reply(
    scope: Scope, kind: Header, store: Store, pieces: Sequence[Outbound], num_bytes: int, usual: BodyPieces
) -> HttpReply:
    """The reply of ``pieces``, ``num_bytes`` in all.

    The last piece is held back until the reply may end, and lies in memory. ``usual`` gives the same bytes, should
    there be no way past the framework.
    """
    *most, last = pieces
    assert isinstance(last, bytes)

    async def send_most() -> bytes | None:
        way = DirectBody.of(scope)
        return last if way is not None and await way.send(store, most, num_bytes - len(last)) else None

    return HttpReply(kind, num_bytes, usual, send_most)


@contextmanager
def watched(scope: Scope, patience_s: Callable[[float], float]) -> Iterator[None]:
    """Within it, a reply that stands still is broken off, and so is one that is left before its end.

    ``patience_s`` is given for how many seconds the reply has stood still, and returns for how many more it may. Does
    nothing where the server does not bound connections.
    """
    connection = connection_of(scope)
    if connection is None:
        yield
        return
    reply = ReplyHandle(connection)
    connection.reply_patience_s = patience_s
    try:
        yield
    finally:
        connection.reply_patience_s = None
        if not reply.is_complete:  # the client would take the next reply on the connection for the rest of this
            reply.break_off()
