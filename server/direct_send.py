"""The body of a large reply, sent past the framework: from the store straight to the client's socket."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from forebay.buffer.store.abc import Outbound, Store
from forebay.server.stalled_clients import Watch, duplicate
from forebay.web.replies import BodyPieces, ClientGone, Header, Reply

EXTENSION = "forebay.direct"
"""Where an ASGI scope has its ``DirectBody``, if its connection has one."""
MAX_TURNS = 100
"""So often the event loop gets its turn before a connection that still has bytes to send is left to the framework."""


class DirectBody:
    """The way to the socket of one request, for use after the reply has been started."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def send(self, store: Store, pieces: Sequence[Outbound], num_bytes: int) -> bool:
        """Send a part of the body, ``num_bytes`` in all; False if it must be sent in the usual way.

        Raises ``StorageFailed`` and ``ClientGone``; the reply cannot be finished then.
        """
        if not await self._is_flushed():
            return False
        with duplicate(self._cycle.transport) as connection:
            try:
                if not await store.send(pieces, connection):
                    return False
            except ConnectionError as error:
                raise ClientGone from error
        self._cycle.expected_content_length -= num_bytes
        return True

    def watched(
        self, client: "asyncio.Task[None]", patience_s: Callable[[float], float]
    ) -> AbstractContextManager[object]:
        """See ``watched``."""
        return nullcontext() if self._is_over else Watch(self._cycle, client, patience_s)

    @property
    def _is_over(self) -> bool:
        return self._cycle.disconnected or self._cycle.transport.is_closing()

    async def _is_flushed(self) -> bool:
        """Whether everything that was written before is with the kernel."""
        for _ in range(MAX_TURNS):
            if self._is_over:
                return False
            if not self._cycle.transport.get_write_buffer_size():
                return True
            await asyncio.sleep(0)
        return False


def has_direct_body(scope: Scope) -> bool:
    """Whether the server that called the app has a way past the framework."""
    return _way(scope) is not None


def _way(scope: Scope) -> DirectBody | None:
    way: DirectBody | None = scope.get("extensions", {}).get(EXTENSION)
    return way


def watched(
    scope: Scope, client: "asyncio.Task[None]", patience_s: Callable[[float], float]
) -> AbstractContextManager[object]:
    """Within it, a reply that stands still is broken off, and so is one that is left before its end.

    ``client`` is done when the client is gone; for ``patience_s`` see ``Watch``. It does nothing for a server without
    a ``DirectBody``.
    """
    way = _way(scope)
    return nullcontext() if way is None else way.watched(client, patience_s)


def direct_reply(
    scope: Scope, kind: Header, store: Store, pieces: Sequence[Outbound], num_bytes: int, usual: BodyPieces
) -> Reply:
    """The reply of ``pieces``, ``num_bytes`` in all.

    The last piece is held back until the reply may end, and lies in memory. ``usual`` gives the same bytes, should
    there be no way past the framework.
    """
    *most, last = pieces
    assert isinstance(last, bytes)

    async def send_most() -> bytes | None:
        way = _way(scope)
        return last if way is not None and await way.send(store, most, num_bytes - len(last)) else None

    return Reply(kind, num_bytes, usual, send_most)
