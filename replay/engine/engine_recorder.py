"""A recorder stands before an engine: everything goes through it, and what is answered is kept in a file."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Self

import msgspec
from starlette.types import Receive, Scope, Send

from forebay.core.errors import EngineError
from forebay.replay.call_request import ADMINISTRATION, FACTS, HEALTH, WORKERS, CallRequest
from forebay.replay.engine.call_writer import CallWriter
from forebay.replay.engine.relay import STREAM, Headers, Upstream
from forebay.replay.engine.served_engine import ServedEngine, is_answer, is_refusal, send_error
from forebay.replay.recorded_calls import CallReply
from forebay.replay.recording_secrets import cleaned
from forebay.web.serving import entered_in_thread

logger = logging.getLogger(__name__)

CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
"""Headers of a call with which the engine is asked what it is."""
PATIENCE_S, PAUSE_S = 1.0, 60.0
"""An engine that was asked in vain for longer than the first is asked again after the second."""
IS_ROUTER = (
    "%s is a router: its workers are hidden from clients, so that no call goes past the recording, and replies that "
    "came through it have no token ids; for those, record a worker"
)


class EngineRecorder(ServedEngine):
    """A server on a free port (or ``port``) of ``host`` that asks the engine at ``upstream``, and adds to ``file``.

    Enter with ``async with``, or with ``with recorder.in_thread()``; ``url`` is given to whoever would get the
    engine's. Streams are passed on as they come. Headers of requests go to the engine and are not kept. Leaving
    gives calls in flight 2 s, breaks off what is left (``num_broken_off``) without recording it, and returns when all
    is in the file.

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
    def num_recorded(self) -> int:
        """The answers that were added to the file, those in which the engine says what it is among them."""
        return self._recording.writer.num_written

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
        await self._recording.ask_facts([])
        await self.serve(stack, self._answer)

    async def _answer(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if request.route == WORKERS:
            await send_error(send, HTTPStatus.NOT_FOUND, "a recorder stands before one engine")
            return
        await self._recording.ask_facts(scope["headers"])
        await self._recording.relay(request, scope, receive, send)


class UpstreamRecording:
    """Calls that are passed on to ``upstream`` and given to ``writer``."""

    def __init__(self, upstream: Upstream, writer: CallWriter) -> None:
        self.writer = writer
        self._upstream = upstream
        self._knows_facts = False
        self._not_before_s = 0.0
        self._refused: set[tuple[tuple[bytes, bytes], ...]] = set()
        """Credentials to which the engine does not tell everything."""
        self._asking = asyncio.Lock()

    async def relay(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> tuple[int, int] | None:
        """Answer a request as the engine does; its number in the file and its record's offset, None if it has none.

        Raises ``EngineUnavailable`` where nobody answers.
        """
        position = self.writer.reserve()
        reply = await self._upstream.relay(request, scope, receive, send)
        if not self._is_kept(request, reply):
            return None
        offset = self.writer.put(position, request, _storable(request, reply))
        return None if offset is None else (position.seq, offset)

    async def ask_facts(self, headers: Headers) -> None:
        """Record what the engine says of itself, once it answers; nothing happens where that is done.

        ``headers`` are those of a call: an engine that wants a key is asked with that of its clients.
        """
        if not self._knows_facts:
            given = tuple((name, value) for name, value in headers if name.lower() in CREDENTIALS)
            async with self._asking:
                await self._ask_facts(given)

    async def _ask_facts(self, given: tuple[tuple[bytes, bytes], ...]) -> None:
        began_s = time.monotonic()
        if self._knows_facts or began_s < self._not_before_s or given in self._refused:
            return
        try:
            answered = [await self._keep_fact(path, list(given)) for path in FACTS]
            workers = await self._upstream.get(WORKERS, list(given))
        except (EngineError, TimeoutError):
            # Asked again with the next call; but calls must not wait for it one after the other.
            ended_s = time.monotonic()
            self._not_before_s = ended_s + PAUSE_S if ended_s - began_s > PATIENCE_S else 0.0
            return
        self._knows_facts = all(answered)
        if not self._knows_facts:
            self._refused.add(given)
        if workers.status == HTTPStatus.OK:
            logger.warning(IS_ROUTER, self._upstream.url)

    async def _keep_fact(self, path: str, headers: Headers) -> bool:
        """False where the engine tells nothing to whoever has these headers."""
        request = CallRequest.read("GET", path, b"")
        reply = await self._upstream.get(path, headers)
        if self._is_kept(request, reply):
            self.writer.put(self.writer.reserve(), request, _storable(request, reply))
        return not is_refusal(reply.status)

    def _is_kept(self, request: CallRequest, reply: CallReply) -> bool:
        is_begun = reply.content_type.startswith(STREAM) and bool(reply.parts)
        if not is_answer(reply.status) or not (reply.is_whole or is_begun):
            return False
        if request.method != "POST":
            is_fact = request.method == "GET" and request.route not in HEALTH
            return is_fact and reply.is_whole and not self.writer.is_known_fact(request, reply.status)
        return request.route not in ADMINISTRATION and not request.is_mark


def _storable(request: CallRequest, reply: CallReply) -> CallReply:
    """The reply; of what an engine says of itself without keys: SGLang's ``/server_info`` has that of the engine."""
    if request.method == "POST":
        return reply
    try:
        value = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return reply
    kept = cleaned(value)
    return reply if kept == value else reply._replace(parts=[(reply.parts[-1][0], msgspec.json.encode(kept))])
