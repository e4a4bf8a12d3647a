"""Single samples, written without the framework: that saves a quarter of the CPU of a write of 4 KB.

uvicorn's protocol parses each request and gives it to an ASGI app in a task of its own. A short ``POST …/buffer/write``
needs neither: it is read, judged and queued in the call that brings its last byte, and answered by the commit that
stores it. Everything out of the ordinary (a long body, no length, no room, pipelining, a bearer token) goes the usual
way, to ``SlimeWrite``.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forebay.buffer.buffer import Entry
from forebay.buffer.write_receipt import Receipt
from forebay.core.errors import BufferFull, ForebayError, StorageFailed
from forebay.core.sample import Incoming, read_sample
from forebay.server.direct_send import EXTENSION, DirectBody
from forebay.server.routes.plain import HotPaths, Match
from forebay.server.routes.write_samples import SlimeWrite, reply_to
from forebay.server.services import Services
from forebay.web.replies import encode, error_headers

logger = logging.getLogger(__name__)

FAILED_WRITE = "the write failed: the server's log says why"
MAX_BYTES = 1 << 20
"""Longer bodies go the usual way, where they hold up nobody while they are parsed."""
_told = SlimeWrite().told
_PATH_END = b"/buffer/write"
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class _Write:
    """One request on its way. To uvicorn it is the connection's cycle, of which it asks what stands first here."""

    __slots__ = ("began_s", "disconnected", "entry", "held_bytes", "keep_alive", "parts", "response_complete")

    def __init__(self, entry: Entry, held_bytes: int) -> None:
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = True
        self.entry = entry
        self.held_bytes = held_bytes
        self.parts: list[bytes] = []
        self.began_s = 0.0

    @property
    def message_event(self) -> "_Write":
        """uvicorn wakes a cycle's task by it; there is none here."""
        return self

    def set(self) -> None:
        """See ``message_event``."""


class ExpressProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a way past the framework for short writes."""

    def __init__(self, paths: HotPaths, services: Services, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._paths = paths
        self._services = services
        self._max_bytes = min(MAX_BYTES, services.settings.max_body_bytes)
        self._needs_token = bool(services.settings.token)
        self._write: _Write | None = None
        self._found: Match | None = None
        self._found_for = b""

    @classmethod
    def over(cls, services: Services) -> type[asyncio.Protocol]:
        """What uvicorn's ``http`` option takes: it is called once for each connection."""
        return cast("type[asyncio.Protocol]", partial(cls, HotPaths(), services))

    @property
    def awaits_body(self) -> bool:
        """Whether a request has begun whose body has not come whole."""
        cycle = self.cycle
        return self._write is not None or (
            isinstance(cycle, RequestResponseCycle) and cycle.more_body and not cycle.response_complete
        )

    # --- called by the parser

    def on_message_begin(self) -> None:
        """As uvicorn's, but for the scope: a write that goes this way needs none."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        write = self._begin() if self.url.endswith(_PATH_END) else None
        if write is None:
            self._make_scope()
            super().on_headers_complete()
            self.scope["extensions"] = {EXTENSION: cast(Any, DirectBody(self.cycle))}
        else:
            self._write = write
            self.cycle = cast(RequestResponseCycle, write)

    def _make_scope(self) -> None:
        """What uvicorn does when a message begins, before anything of it is known."""
        url, headers, is_awaiting = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, is_awaiting
        self.headers.extend(headers)

    def on_body(self, body: bytes) -> None:
        if self._write is None:
            super().on_body(body)
        else:
            self._write.parts.append(body)

    def on_message_complete(self) -> None:
        write, self._write = self._write, None
        if write is None:
            super().on_message_complete()
        else:
            self._take_in(write)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._write is not None:  # its body will never be complete
            self._free(self._write)
            self._write = None

    # --- one write

    def _begin(self) -> _Write | None:
        """The write whose headers have come, or None if it must go the usual way."""
        length = self._length()
        if length is None or not self._is_ordinary() or not self._is_found():
            return None
        assert self._found is not None
        _, find, name = self._found
        try:
            entry = find(self._services, name)
        except ForebayError:
            return None
        return _Write(entry, length) if self._services.bodies.try_take(length) else None

    def _is_found(self) -> bool:
        """Whether the path leads to a run that may be written to like this; a writer keeps to one path."""
        url = self.url
        if url != self._found_for:
            may_pass = b"%" not in url and (not self._needs_token or url.startswith(b"/w/"))
            self._found = self._paths.match(url.decode("ascii")) if may_pass else None
            self._found_for = url
        return self._found is not None

    def _length(self) -> int | None:
        """The length of a body that is not too long, has no encoding, and comes without being asked for."""
        length = None
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit():
                length = int(value)
            elif name in (b"content-encoding", b"transfer-encoding", b"expect", b"upgrade"):
                return None
        return length if length is not None and length <= self._max_bytes else None

    def _is_ordinary(self) -> bool:
        parser, before = self.parser, self.cycle
        return (
            (before is None or before.response_complete)
            and not self.flow.write_paused
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
        )

    def _take_in(self, write: _Write) -> None:
        body = write.parts[0] if len(write.parts) == 1 else b"".join(write.parts)
        write.parts.clear()
        write.began_s = time.perf_counter()
        try:
            sample = read_sample(body, is_lenient=True)
            receipt = write.entry.buffer.write(sample)
        except BufferFull:
            self._spawn(self._take_in_later(write, sample))
        except ForebayError as error:
            self._refuse(write, error)
        except Exception:  # the parser would take it for a fault of the client's
            logger.exception("a write failed")
            self._refuse(write, ForebayError(FAILED_WRITE))
        else:
            receipt.when_stored(partial(self._confirm, write, receipt, body))

    async def _take_in_later(self, write: _Write, sample: Incoming) -> None:
        """There is no room at present."""
        try:
            receipt = await write.entry.buffer.write_when_room(sample, self._services.settings.write_wait_s)
            await receipt.stored
        except ForebayError as error:
            self._refuse(write, error)
        except Exception:  # the client must not wait for ever, nor the body's room be lost
            logger.exception("a write failed")
            self._refuse(write, ForebayError(FAILED_WRITE))
        else:
            self._confirm(write, receipt, sample.body, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _confirm(self, write: _Write, receipt: Receipt, body: bytes, error: StorageFailed | None) -> None:
        if error is not None:
            self._refuse(write, error)
            return
        self._services.metrics.write_seconds.observe(time.perf_counter() - write.began_s)
        head, tail = reply_to(receipt)
        self._reply(write, b"".join((_OK % (len(head) + len(body) + len(tail)), head, body, tail)))

    def _refuse(self, write: _Write, error: ForebayError) -> None:
        body = encode(_told(error))
        status = HTTPStatus(error.status)
        more = b"".join(b"%s: %s\r\n" % header for header in error_headers(error))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        self._reply(write, head % (status, status.phrase.encode(), len(body), more) + body)

    def _reply(self, write: _Write, reply: bytes) -> None:
        self._free(write)
        write.response_complete = True
        if write.disconnected or self.transport.is_closing():
            return
        self.transport.write(reply)
        if not write.keep_alive:  # the server is ending
            self.transport.close()
        self.on_response_complete()

    def _free(self, write: _Write) -> None:
        self._services.bodies.give(write.held_bytes)
        write.held_bytes = 0
