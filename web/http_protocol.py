"""HTTP with limits on what one connection may send, and how long it may keep the server waiting.

This is the one module that depends on uvicorn's internals. If another release of uvicorn differs, ``http_protocol``
logs once which limits are missing, and uvicorn's own protocol is used.
"""

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Self

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http import flow_control, httptools_impl

from forebay.core.errors import ForebayError
from forebay.web.connection_limits import ConnectionLimits, ConnectionSweep, HeadTooLarge, RequestStalled
from forebay.web.replies import encode, error_body

logger = logging.getLogger(__name__)

EXTENSION = "forebay.connection"
"""Key of an ASGI scope for its ``BoundedProtocol``, if it has one."""
_BYTES_ACKED = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in Linux' ``tcp_info``."""
REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
USED = {
    "HttpToolsProtocol": frozenset(
        {"connections", "cycle", "flow", "headers", "loop", "parser", "pipeline", "scope", "server_state", "transport"}
    ),
    "RequestResponseCycle": frozenset(
        {
            "disconnected",
            "expected_content_length",
            "keep_alive",
            "message_event",
            "more_body",
            "response_complete",
            "transport",
        }
    ),
    "FlowControl": frozenset({"read_paused", "write_paused"}),
}
CALLED = frozenset(
    {
        "connection_lost",
        "connection_made",
        "data_received",
        "on_body",
        "on_headers_complete",
        "on_message_complete",
        "on_response_complete",
    }
)
MISSING = (
    "large replies are sent through the framework, max_head_bytes, head_timeout_s and body_timeout_s are not enforced, "
    "and requests are read before the one ahead of them is answered"
)


def http_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol] | str:
    """The value of uvicorn's ``http`` option: a ``BoundedProtocol``, or uvicorn's own if a part is missing."""
    missing = {name for name in CALLED if not hasattr(httptools_impl.HttpToolsProtocol, name)}
    for kind, used in USED.items():  # uvicorn's protocol module imports the other two
        missing |= _missing(getattr(httptools_impl, kind, object), used)
    if not missing:
        return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits, "sweep": ConnectionSweep(limits)})
    logger.warning("uvicorn %s has no %s: %s", uvicorn.__version__, ", ".join(sorted(missing)), MISSING)
    return "httptools"


def _missing(part: type[Any], used: frozenset[str]) -> set[str]:
    # Its attributes are set in the constructor, not on the class: the names in its code show them without a call.
    code = getattr(part.__init__, "__code__", None)
    return set(used.difference(code.co_names if code else ()))


def connection_of(scope: Scope) -> "BoundedProtocol | None":
    """The connection of a request, if its server limits connections; else None."""
    extensions = scope.get("extensions")
    connection: BoundedProtocol | None = None if extensions is None else extensions.get(EXTENSION)
    return connection


class PausableFlow(flow_control.FlowControl):
    """uvicorn's flow control, which resumes whenever an app asks for a message; this one can be shut meanwhile."""

    is_shut = False

    def resume_reading(self) -> None:
        if not self.is_shut:
            super().resume_reading()


class BoundedProtocol(httptools_impl.HttpToolsProtocol):
    """uvicorn's protocol, reading one request at a time and closing connections that exceed ``limits``.

    The parser gets pieces that end where a request may end, so that no part of a second request is parsed before the
    first is answered. A head and a chunked body end in an empty line, any other body after its announced length.
    """

    limits: ClassVar[ConnectionLimits]
    sweep: ClassVar[ConnectionSweep]
    flow: PausableFlow

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._extensions: dict[str, Any] = {EXTENSION: self}
        self._held, self._held_from = b"", 0
        """Data received beyond the current request, and the offset where it starts."""
        self._num_head_bytes = 0
        self._is_in_body = False
        self._left_bytes: int | None = 0
        """Bytes of the body still to come; None if only its chunks determine them."""
        self._num_unpaid_bytes = 0
        """Bytes of a chunked body since its last payload: sizes, extensions and trailers."""
        self._is_deaf = False
        self._num_packets = 0
        self._num_heads = 0
        self.is_awaited = False
        """Whether the app is currently reading the body."""
        self.is_late = False
        """Whether the body was stalled for too long: its reader must reply, then the connection is closed."""
        self.has_sent_body = False
        self.reply_patience_s: Callable[[float], float] | None = None
        """Maps seconds that the reply has stalled to seconds that it still may; None for the usual limit."""

    # --- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PausableFlow(transport)
        self.sweep.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.sweep.discard(self)
        if self.reply_patience_s is not None:
            self._shut_down()
        super().connection_lost(exc)
        # Reference cycles would stay in memory until the garbage collector runs, which is rare.
        self._extensions.clear()
        self._held, self.scope, self.headers = b"", None, None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._num_packets += 1
        if self._held:  # no data should arrive while reading is paused
            data, self._held = self._held[self._held_from :] + data, b""
            self._hold(data, 0)
        else:
            self._parse(data, 0)

    # --- pieces

    def _parse(self, data: bytes, at: int) -> None:
        end = len(data)
        while at < end and not self._is_deaf:
            if self.is_answering:
                self._hold(data, at)
                return
            stop = self._end_of_piece(data, at)
            if not self._is_in_body:
                self._num_head_bytes += stop - at
                if self._num_head_bytes > self.limits.max_head_bytes:
                    self._refuse(HeadTooLarge(self.limits.max_head_bytes))
                    return
            super().data_received(data if stop - at == end else memoryview(data)[at:stop])  # type: ignore[arg-type]
            if self._num_unpaid_bytes > self.limits.max_head_bytes or self.transport.is_closing():
                self._is_deaf = True
                self.transport.close()
            at = stop

    def _end_of_piece(self, data: bytes, at: int) -> int:
        """The end of the piece that starts at ``at``: no request ends inside it."""
        end = len(data)
        if self._is_in_body and self._left_bytes is not None:
            stop = min(end, at + self._left_bytes)
            self._left_bytes -= stop - at
            return max(stop, at + 1)
        if at == 0 and (self._is_in_body or self._num_head_bytes):  # the empty line may have begun in the last packet
            if data[0] == 10:
                return 1
            if data[:2] == b"\r\n":
                return 2
        found = data.find(b"\n\r\n", max(0, at - 2))  # it may have begun in the piece before
        stop = end if found < 0 else found + 3
        if self._is_in_body:
            self._num_unpaid_bytes += stop - at
        return stop

    def _hold(self, data: bytes, at: int) -> None:
        self._held, self._held_from = data, at
        self.flow.pause_reading()
        self.flow.is_shut = True

    def _parse_held(self) -> None:
        """Parse the data kept back, now that the request before it is answered."""
        if self.transport.is_closing() or self.is_answering:
            return
        data, self._held = self._held, b""
        self.flow.is_shut = False
        self._parse(data, self._held_from)
        if not self._held:
            self.flow.resume_reading()

    # --- the parser's side

    def on_headers_complete(self) -> None:
        """Start the app in a task, so that it begins after this call."""
        if self.is_answering:  # no piece should have parts of two requests; if one does, it cannot be trusted
            self._is_deaf = True
            self.transport.close()
            return
        super().on_headers_complete()
        self.scope["extensions"] = self._extensions
        self._num_head_bytes = self._num_unpaid_bytes = 0
        self._num_heads += 1
        self._is_in_body = True
        self._left_bytes = _body_length(self.headers)
        self.headers = []  # trailers are dropped: the app has the other list
        self.is_awaited = self.is_late = False
        if self.parser.should_upgrade():  # to a protocol not supported here: the data that follows is not HTTP
            self.cycle.keep_alive = False
            self._is_deaf = True

    def on_body(self, body: bytes) -> None:
        self._num_unpaid_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    # --- the app's side

    def on_response_complete(self) -> None:
        """Replace uvicorn's method, which would set a timer for each request, and start the next one."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.is_late:
            self.transport.close()
            return
        if self._held:
            self.loop.call_soon(self._parse_held)
        else:
            self.flow.resume_reading()

    def pause_reading(self) -> None:
        """Stop reading until the app asks for the next part of a body."""
        self.flow.pause_reading()

    @property
    def is_answering(self) -> bool:
        """Whether a complete request has not been answered yet."""
        return not self._is_in_body and self.cycle is not None and not self.cycle.response_complete

    # --- the sweep's side

    @property
    def waits_for(self) -> str:
        """What the server is waiting for, as ``ConnectionSweep`` names it."""
        if self._is_to_take:
            return "take"
        if self._is_in_body:
            is_reading = self.is_awaited and not self.flow.read_paused
            return "body" if is_reading or self.cycle.response_complete else ""
        if self.is_answering:
            return ""
        if self._is_deaf:
            return "end"
        return "head" if self._num_head_bytes else "idle"

    @property
    def progress(self) -> int:
        """A number that changes as long as the client makes progress."""
        if self._is_to_take:
            # The transport only learns of it when the kernel has room again: megabytes later.
            connection = self.transport.get_extra_info("socket")
            return _num_taken(connection) or self.transport.get_write_buffer_size() + _num_untaken(connection)
        # A head that arrives byte by byte is still late.
        return self._num_packets if self._is_in_body else self._num_heads

    @property
    def _is_to_take(self) -> bool:
        """Whether the server can only wait for the client to read what was sent."""
        if self.transport.is_closing() or self.flow.write_paused:
            return True
        # If the reply is sent past the transport, only the kernel knows how much was read.
        return self.reply_patience_s is not None and _num_untaken(self.transport.get_extra_info("socket")) > 0

    def end_wait(self, waited_for: str) -> None:
        """End the connection: the client has used up its time."""
        if waited_for == "head":
            self._refuse(RequestStalled("the headers of a request did not arrive in time", "head_timeout_s"))
        elif waited_for in ("end", "take"):
            self._shut_down()
            self.transport.abort()
        elif waited_for == "body" and not self.cycle.response_complete:
            self.is_late = True
            self.cycle.message_event.set()
        else:
            self.transport.close()

    def _shut_down(self) -> None:
        """Make a thread that sends past the transport, on its own descriptor, fail with an error."""
        with suppress(OSError), duplicate(self.transport) as connection:  # it may have ended already
            connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, error: ForebayError) -> None:
        """Reply before there is a request, and stop reading."""
        self._is_deaf = True
        body = encode(error_body(error))
        head = b"HTTP/1.1 %d %s\r\n" % (error.status, REASONS[error.status])
        kind = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + kind + body)
        self.transport.write_eof()


def _body_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Body length as the parser understood it: it accepts only digits, and a single length."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return None
    return 0


def duplicate(transport: asyncio.Transport) -> socket.socket:
    """A non-blocking duplicate of the connection: the transport may close its own descriptor at any time."""
    connection: socket.socket = transport.get_extra_info("socket").dup()
    connection.setblocking(False)
    return connection


def _num_taken(connection: socket.socket) -> int:
    """Bytes that the other side has acknowledged so far; 0 if the kernel does not count them."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return int(_BYTES_ACKED.unpack(info)[0]) if len(info) == _BYTES_ACKED.size else 0


def _num_untaken(connection: socket.socket) -> int:
    """Bytes given to the kernel that the other side has not acknowledged."""
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class ReplyHandle:
    """The reply under way of one request, for code that sends past the framework or breaks it off."""

    __slots__ = ("_cycle",)

    def __init__(self, connection: BoundedProtocol) -> None:
        # The request's own: the connection moves on to the next one when this is answered.
        self._cycle = connection.cycle

    @classmethod
    def of(cls, scope: Scope) -> Self | None:
        """The reply of a request under way, if its server limits connections; else None."""
        connection = connection_of(scope)
        return None if connection is None else cls(connection)

    @property
    def transport(self) -> asyncio.Transport:
        return self._cycle.transport

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent."""
        return self._cycle.disconnected or self.transport.is_closing()

    @property
    def is_complete(self) -> bool:
        """Whether the transport has the whole reply."""
        return self._cycle.response_complete

    def note_sent(self, num_bytes: int) -> None:
        """Count bytes sent past uvicorn, which checks the announced length against what it sent itself."""
        self._cycle.expected_content_length -= num_bytes

    def break_off(self) -> None:
        """End the connection in the middle of the reply."""
        # Otherwise uvicorn would log the missing rest as an error of the app.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self.transport.abort()
