"""HTTP within bounds: what one connection may send, and for how long it may keep the server waiting.

The one module that knows uvicorn's inside. Where another release of uvicorn has a different one, ``http_protocol`` says
once which bounds are missing, and uvicorn's own protocol serves.
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
"""Where an ASGI scope has its ``BoundedProtocol``, if it has one."""
_BYTES_ACKED = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` of Linux' ``tcp_info``."""
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
    "large replies take the ordinary way, nothing holds max_head_bytes, head_timeout_s and body_timeout_s, and "
    "requests are read before the one ahead of them is answered"
)


def http_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol] | str:
    """What uvicorn's ``http`` option takes: a ``BoundedProtocol``, or where uvicorn lacks a part its own protocol."""
    missing = {name for name in CALLED if not hasattr(httptools_impl.HttpToolsProtocol, name)}
    for kind, used in USED.items():  # uvicorn's module of the protocol imports the other two
        missing |= _missing(getattr(httptools_impl, kind, object), used)
    if not missing:
        return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits, "sweep": ConnectionSweep(limits)})
    logger.warning("uvicorn %s has no %s: %s", uvicorn.__version__, ", ".join(sorted(missing)), MISSING)
    return "httptools"


def _missing(part: type[Any], used: frozenset[str]) -> set[str]:
    # Its attributes exist from the constructor on, on no class: the names that its code sets show them without a call.
    code = getattr(part.__init__, "__code__", None)
    return set(used.difference(code.co_names if code else ()))


def connection_of(scope: Scope) -> "BoundedProtocol | None":
    """The connection of a request, if its server bounds connections."""
    extensions = scope.get("extensions")
    connection: BoundedProtocol | None = None if extensions is None else extensions.get(EXTENSION)
    return connection


class PausableFlow(flow_control.FlowControl):
    """uvicorn's, which resumes whenever an app asks for a message; this one may be shut meanwhile."""

    is_shut = False

    def resume_reading(self) -> None:
        if not self.is_shut:
            super().resume_reading()


class BoundedProtocol(httptools_impl.HttpToolsProtocol):
    """uvicorn's protocol, which reads one request at a time and closes what goes beyond ``limits``.

    The parser is fed in pieces that end where a request may end, so that nothing of a second one is parsed before the
    first is answered: a head and a chunked body end in an empty line, any other body after its announced length.
    """

    limits: ClassVar[ConnectionLimits]
    sweep: ClassVar[ConnectionSweep]
    flow: PausableFlow

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._extensions: dict[str, Any] = {EXTENSION: self}
        self._held, self._held_from = b"", 0
        """What came beyond the request under way, from an offset on."""
        self._num_head_bytes = 0
        self._is_in_body = False
        self._left_bytes: int | None = 0
        """What is still to come of a body; None where only its chunks tell."""
        self._num_unpaid_bytes = 0
        """Of a chunked body since its last payload: sizes, extensions and trailers."""
        self._is_deaf = False
        self._num_packets = 0
        self._num_heads = 0
        self.is_awaited = False
        """Whether somebody reads the body just now."""
        self.is_late = False
        """The body stood still for too long: whoever reads it is to answer, then the connection is closed."""
        self.has_sent_body = False
        self.reply_patience_s: Callable[[float], float] | None = None
        """For how many more seconds the reply under way may stand still, given for how many it has; else a bound."""

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
        # What forms circles would stay in memory until a collector comes by, which is seldom.
        self._extensions.clear()
        self._held, self.scope, self.headers = b"", None, None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._num_packets += 1
        if self._held:  # nothing should come while reading is paused
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
        """Where the piece from ``at`` on ends: no request ends within it."""
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

    def _go_on(self) -> None:
        """Parse what was held, now that the request before it is answered."""
        if self.transport.is_closing() or self.is_answering:
            return
        data, self._held = self._held, b""
        self.flow.is_shut = False
        self._parse(data, self._held_from)
        if not self._held:
            self.flow.resume_reading()

    # --- the parser's side

    def on_headers_complete(self) -> None:
        """The app is called in a task, so that it begins after this has ended."""
        if self.is_answering:  # no piece holds parts of two requests; should one, nothing of it can be trusted
            self._is_deaf = True
            self.transport.close()
            return
        super().on_headers_complete()
        self.scope["extensions"] = self._extensions
        self._num_head_bytes = self._num_unpaid_bytes = 0
        self._num_heads += 1
        self._is_in_body = True
        self._left_bytes = _body_length(self.headers)
        self.headers = []  # trailers go nowhere: the app has the other list
        self.is_awaited = self.is_late = False
        if self.parser.should_upgrade():  # to a protocol that is not spoken here: whatever follows is no HTTP
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
        """Instead of uvicorn's, which would set a timer for each request, and start the next one."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.is_late:
            self.transport.close()
            return
        if self._held:
            self.loop.call_soon(self._go_on)
        else:
            self.flow.resume_reading()

    def pause_reading(self) -> None:
        """Read no more until the app asks for the next part of a body."""
        self.flow.pause_reading()

    @property
    def is_answering(self) -> bool:
        """Whether a request came whole and is not answered."""
        return not self._is_in_body and self.cycle is not None and not self.cycle.response_complete

    # --- the sweep's side

    @property
    def waits_for(self) -> str:
        """What the client owes, as ``ConnectionSweep`` names it."""
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
        """Changes while the client goes on with what it owes."""
        if self._is_to_take:
            # The transport alone hears of it only when the kernel has room again: megabytes later.
            connection = self.transport.get_extra_info("socket")
            return _num_taken(connection) or self.transport.get_write_buffer_size() + _num_untaken(connection)
        # A head may come byte by byte, and is late all the same.
        return self._num_packets if self._is_in_body else self._num_heads

    @property
    def _is_to_take(self) -> bool:
        """Whether all that can go on is that the client takes what was sent."""
        if self.transport.is_closing() or self.flow.write_paused:
            return True
        # Of a reply that is sent past the transport, the kernel alone knows.
        return self.reply_patience_s is not None and _num_untaken(self.transport.get_extra_info("socket")) > 0

    def end_wait(self, waited_for: str) -> None:
        """The client had all the time that it has for this."""
        if waited_for == "head":
            self._refuse(RequestStalled("the headers of a request did not come whole", "head_timeout_s"))
        elif waited_for in ("end", "take"):
            self._shut_down()
            self.transport.abort()
        elif waited_for == "body" and not self.cycle.response_complete:
            self.is_late = True
            self.cycle.message_event.set()
        else:
            self.transport.close()

    def _shut_down(self) -> None:
        """Let a thread that sends past the transport, on a descriptor of its own, get an error."""
        with suppress(OSError), duplicate(self.transport) as connection:  # it may have ended already
            connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, error: ForebayError) -> None:
        """Answer before there is a request, and listen no more."""
        self._is_deaf = True
        body = encode(error_body(error))
        head = b"HTTP/1.1 %d %s\r\n" % (error.status, REASONS[error.status])
        kind = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + kind + body)
        self.transport.write_eof()


def _body_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """As the parser understood it, which takes digits only, and no second length."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return None
    return 0


def duplicate(transport: asyncio.Transport) -> socket.socket:
    """The connection once more, without blocking: the transport may close its own descriptor at any time."""
    connection: socket.socket = transport.get_extra_info("socket").dup()
    connection.setblocking(False)
    return connection


def _num_taken(connection: socket.socket) -> int:
    """How many bytes the other side has taken so far; 0 where the kernel does not count."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return int(_BYTES_ACKED.unpack(info)[0]) if len(info) == _BYTES_ACKED.size else 0


def _num_untaken(connection: socket.socket) -> int:
    """How many bytes were given to the kernel that the other side has not taken."""
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class ReplyHandle:
    """One request whose reply is under way, for those who send past the framework, or break it off."""

    __slots__ = ("_cycle",)

    def __init__(self, connection: BoundedProtocol) -> None:
        # The request's own: the connection goes on to the next one when this is answered.
        self._cycle = connection.cycle

    @classmethod
    def of(cls, scope: Scope) -> Self | None:
        """The reply of a request that is under way, if its server bounds connections."""
        connection = connection_of(scope)
        return None if connection is None else cls(connection)

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

    def note_sent(self, num_bytes: int) -> None:
        """uvicorn counts what it sends itself against the announced length, and would miss these bytes."""
        self._cycle.expected_content_length -= num_bytes

    def break_off(self) -> None:
        """End the connection in the middle of the reply."""
        # Else uvicorn would log the missing rest as an error of the app's.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self.transport.abort()
