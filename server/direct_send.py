"""The body of a large reply, sent past the framework: from the store straight to the client's socket.

The one module that knows uvicorn's inside. Where another release of uvicorn has a different one, the server says so
once, and replies take the ordinary way.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http import httptools_impl

from forebay.buffer.store.abc import Outbound, Store
from forebay.web.replies import BodyPieces, ClientGone, Header, HttpReply

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger(__name__)

EXTENSION = "forebay.direct"
"""Where an ASGI scope has its ``DirectBody``, if its connection has one."""
MAX_TURNS = 100
"""So often the event loop gets its turn before a connection that has bytes left to send is left to the framework."""
USED_OF_PROTOCOL = frozenset({"transport", "cycle", "scope"})
USED_OF_CYCLE = frozenset(
    {"transport", "disconnected", "response_complete", "message_event", "expected_content_length", "more_body"}
)


class DirectProtocol(httptools_impl.HttpToolsProtocol):
    """uvicorn's protocol, with a way to the socket in the scope of each request."""

    def on_headers_complete(self) -> None:
        """The app is called in a task, so that it begins after this has ended."""
        super().on_headers_complete()
        self.scope["extensions"] = {EXTENSION: DirectBody(self.cycle)}  # type: ignore[dict-item]


def http_protocol() -> type[asyncio.Protocol] | str:
    """What uvicorn's ``http`` option takes: ``DirectProtocol``, or where parts of uvicorn are missing its own one."""
    missing = _missing(httptools_impl.HttpToolsProtocol, USED_OF_PROTOCOL)
    missing |= _missing(getattr(httptools_impl, "RequestResponseCycle", object), USED_OF_CYCLE)
    if not missing:
        return DirectProtocol
    names = ", ".join(sorted(missing))
    logger.warning("uvicorn %s has no %s: large replies take the ordinary way", uvicorn.__version__, names)
    return "httptools"


def _missing(part: type[Any], used: frozenset[str]) -> set[str]:
    # Its attributes exist from the constructor on, on no class: the names that its code sets show them without a call.
    code = getattr(part.__init__, "__code__", None)
    return set(used.difference(code.co_names if code else ()))


def awaits_body(connection: object) -> bool:
    """Whether a request has begun on one of uvicorn's connections whose body has not come whole."""
    # By name, with defaults: it is asked of uvicorn's own protocol as well, whose inside may have changed.
    cycle = getattr(connection, "cycle", None)
    return bool(getattr(cycle, "more_body", False)) and not getattr(cycle, "response_complete", True)


def duplicate(transport: asyncio.Transport) -> socket.socket:
    """The connection once more, without blocking: the transport may close its own descriptor at any time."""
    connection: socket.socket = transport.get_extra_info("socket").dup()
    connection.setblocking(False)
    return connection


class DirectBody:
    """The way to the socket of one request, for use after the reply has been started."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: "RequestResponseCycle") -> None:
        self._cycle = cycle

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
        # uvicorn counts what it sends itself against the announced length, and would miss these bytes.
        self._cycle.expected_content_length -= num_bytes
        return True

    @property
    def transport(self) -> asyncio.Transport:
        return self._cycle.transport

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._cycle.disconnected or self.transport.is_closing()

    @property
    def is_complete(self) -> bool:
        """Whether the whole reply was given to the transport."""
        return self._cycle.response_complete

    def note_disconnect(self) -> None:
        """The client's connection was ended here: else uvicorn would log the missing rest as an error of the app's."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()

    async def _is_flushed(self) -> bool:
        """Whether everything that was written before is with the kernel."""
        for _ in range(MAX_TURNS):
            if self.is_over:
                return False
            if not self.transport.get_write_buffer_size():
                return True
            await asyncio.sleep(0)  # uvloop writes at the end of a turn
        return False


def direct_body(scope: Scope) -> DirectBody | None:
    """The way past the framework, if the server that called the app has one."""
    way: DirectBody | None = scope.get("extensions", {}).get(EXTENSION)
    return way


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
        way = direct_body(scope)
        return last if way is not None and await way.send(store, most, num_bytes - len(last)) else None

    return HttpReply(kind, num_bytes, usual, send_most)
