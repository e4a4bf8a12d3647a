"""A recorder stands before an engine: everything goes through it, and what is answered is kept in a file."""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Self

from starlette.types import Receive, Scope, Send

from forebay.core.errors import EngineError
from forebay.replay.engine.call_frames import CallReply
from forebay.replay.engine.call_request import ADMINISTRATION, FACTS, HEALTH, WORKERS, CallRequest
from forebay.replay.engine.call_writer import CallWriter
from forebay.replay.engine.relay import STREAM, Upstream
from forebay.replay.engine.served_engine import ServedEngine, is_answer, send_error
from forebay.web.serving import entered_in_thread

logger = logging.getLogger(__name__)

IS_ROUTER = (
    "%s is a router: its workers are hidden from clients, so that no call goes past the recording, and replies that "
    "came through it have no token ids; for those, record a worker"
)


class EngineRecorder(ServedEngine):
    """A server on a free port (or ``port``) of ``host`` that asks the engine at ``upstream``, and adds to ``file``.

    Enter with ``async with``, or with ``with recorder.in_thread()``; ``url`` is given to whoever would get the
    engine's. Streams are passed on as they come. Headers of requests go to the engine and are not kept. Leaving
    returns when all is in the file.

    Raises ``InvalidInput`` for an ``upstream`` that is no http(s) address and a name among ``allowed_hosts`` that is
    none; entering raises it where it cannot listen or ``file`` cannot be written, ``RecordingDamaged`` where that is
    no recording, ``MissingExtra`` without zstandard.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        upstream: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: Sequence[str] = (),
        insecure: bool = False,
    ) -> None:
        super().__init__(host, port, allowed_hosts, insecure)
        self._file = Path(file)
        self._upstream = Upstream(upstream)
        self._recording: UpstreamRecording

    @property
    def num_lost(self) -> int:
        """Calls that could not be written."""
        return self._recording.writer.num_lost

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a thread of its own, for code without an event loop. Raises what entering it raises, here."""
        with entered_in_thread(self, "engine-recorder"):
            yield self

    async def enter(self, stack: AsyncExitStack) -> None:
        """Open the file, and serve."""
        writer = await asyncio.to_thread(CallWriter, self._file)
        stack.push_async_callback(asyncio.to_thread, writer.close)
        stack.push_async_callback(self._upstream.close)
        self._recording = UpstreamRecording(self._upstream, writer)
        await self._recording.ask_facts()
        await self.serve(stack, self._answer)

    async def _answer(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if request.route == WORKERS:
            await send_error(send, HTTPStatus.NOT_FOUND, "a recorder stands before one engine")
            return
        await self._recording.ask_facts()
        await self._recording.relay(request, scope, receive, send)


class UpstreamRecording:
    """Calls that are passed on to ``upstream`` and given to ``writer``."""

    def __init__(self, upstream: Upstream, writer: CallWriter) -> None:
        self.writer = writer
        self._upstream = upstream
        self._knows_facts = False
        self._asking = asyncio.Lock()

    async def relay(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> int | None:
        """Answer a request as the engine does; the number under which it is recorded, None if it is not.

        Raises ``EngineUnavailable`` where nobody answers.
        """
        place = self.writer.reserve(request)
        reply = await self._upstream.relay(request, scope, receive, send)
        if not self._is_kept(request, reply):
            return None
        self.writer.put(place, request, reply)
        return place.seq

    async def ask_facts(self) -> None:
        """Record what the engine says of itself, once it answers; nothing happens where that is done."""
        if not self._knows_facts:
            async with self._asking:
                await self._ask_facts()

    async def _ask_facts(self) -> None:
        if self._knows_facts:
            return
        try:
            for path in FACTS:
                await self._keep_fact(path)
            workers = await self._upstream.get(WORKERS)
        except (EngineError, TimeoutError):
            return  # asked again with the next call
        self._knows_facts = True
        if workers.status == HTTPStatus.OK:
            logger.warning(IS_ROUTER, self._upstream.url)

    async def _keep_fact(self, path: str) -> None:
        request = CallRequest.read("GET", path, b"")
        reply = await self._upstream.get(path)
        if self._is_kept(request, reply):
            self.writer.put(self.writer.reserve(request), request, reply)

    def _is_kept(self, request: CallRequest, reply: CallReply) -> bool:
        is_begun = reply.content_type.startswith(STREAM) and bool(reply.parts)
        if not is_answer(reply.status) or not (reply.is_whole or is_begun):
            return False
        if request.method != "POST":
            is_fact = request.method == "GET" and request.route not in HEALTH
            return is_fact and reply.is_whole and not self.writer.is_known_fact(request, reply.status)
        return request.route not in ADMINISTRATION and not request.is_mark
