"""Large replies: sent past the framework, from the store to the client's socket, and broken off if they stall.

If ``web/http_protocol`` does not know the installed release of uvicorn, replies are sent through the framework.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Scope

from forebay.buffer.store.abc import Outbound, Store
from forebay.web.http_protocol import ReplyHandle, connection_of, duplicate
from forebay.web.replies import BodyPieces, ClientGone, Header, HttpReply

MAX_TURNS = 100
"""Turns of the event loop to wait for unsent bytes before the connection is left to the framework."""


class DirectBody(ReplyHandle):
    """Sends body bytes to the socket of one request, once the reply has been started."""

    __slots__ = ()

    async def send(self, store: Store, pieces: Sequence[Outbound], num_bytes: int) -> bool:
        """Send a part of the body, ``num_bytes`` in all; False if it must be sent through the framework.

        Raises ``StorageFailed`` and ``ClientGone``; the reply cannot be finished after either.
        """
        if not await self._is_flushed():  # these bytes would overtake those the transport has not sent
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
        """Whether the kernel has everything that was written before."""
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
    """The reply made of ``pieces``, ``num_bytes`` in all.

    The last piece is kept in memory until the reply may end. ``usual`` returns the same bytes, for a connection that
    cannot bypass the framework.
    """
    *most, last = pieces
    assert isinstance(last, bytes)

    async def send_most() -> bytes | None:
        way = DirectBody.of(scope)
        return last if way is not None and await way.send(store, most, num_bytes - len(last)) else None

    return HttpReply(kind, num_bytes, usual, send_most)


@contextmanager
def watched(scope: Scope, patience_s: Callable[[float], float]) -> Iterator[None]:
    """Break off a reply that stalls within this context, or that is abandoned before its end.

    ``patience_s`` receives how many seconds the reply has stalled, and returns how many more it may. Does nothing if
    the server does not bound connections.
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
        if not reply.is_complete:  # the client would take the next reply on this connection for the rest of this one
            reply.break_off()
