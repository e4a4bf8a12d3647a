"""A recorder runs in front of an engine: it forwards every request and stores the answers in a file."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
"""Headers of a call that are also used to ask the engine for its facts."""
PATIENCE_S, PAUSE_S = 1.0, 60.0
"""If asking for facts fails and takes longer than the first, the next attempt waits for the second."""
IS_ROUTER = (
    "%s is a router: its workers are hidden from clients, so that no call bypasses the recording, and replies that "
    "came through it have no token ids; for token ids, record a worker"
)


class EngineRecorder(ServedEngine):
    """A server on a free port (or ``port``) of ``host`` that forwards to ``upstream`` and records to ``file``.

    Enter with ``async with``, or with ``with recorder.in_thread()``. Give ``url`` to clients in place of the engine's.
    Streams are forwarded as they arrive. Request headers are forwarded but not stored. On exit, calls in flight have
    2 s to end. The rest are cut off without being recorded (``num_broken_off``), and the file is closed.

    Raises ``InvalidInput`` for an ``upstream`` that is not an http(s) address, or an invalid name in
    ``allowed_hosts``. Entering raises ``InvalidInput`` if it cannot listen or cannot write ``file``,
    ``RecordingDamaged`` if ``file`` is not a recording, ``MissingExtra`` without zstandard.
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
        """The answers that were added to the file, including the engine's facts about itself."""
        return self._recording.writer.num_written

    @property
    def num_lost(self) -> int:
        """Calls that could not be written."""
        return self._recording.writer.num_lost

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a separate thread, for code without an event loop. Raises the errors of entering."""
        with entered_in_thread(self, "engine-recorder"):
            yield self

    async def enter(self, stack: AsyncExitStack) -> None:
        """Open the file and start serving."""
        writer = await asyncio.to_thread(CallWriter, self._file)
        stack.push_async_callback(asyncio.to_thread, writer.close)
        stack.push_async_callback(self._upstream.close)
        self._recording = UpstreamRecording(self._upstream, writer)
        await self._recording.ask_facts([])
        await self.serve(stack, self._answer)

    async def _answer(self, request: CallRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if request.route == WORKERS:
            await send_error(send, HTTPStatus.NOT_FOUND, "a recorder serves a single engine and lists no workers")
            return
        await self._recording.ask_facts(scope["headers"])
        await self._recording.relay(request, scope, receive, send)


class UpstreamRecording:
    """Forwards calls to ``upstream`` and passes them to ``writer``."""

    def __init__(self, upstream: Upstream, writer: CallWriter) -> None:
        self.writer = writer
        self._upstream = upstream
        self._knows_facts = False
        self._not_before_s = 0.0
        self._refused: set[tuple[tuple[bytes, bytes], ...]] = set()
        """Credentials that the engine refused for some of its facts."""
        self._asking = asyncio.Lock()

    async def relay(
        self,
        request: CallRequest,
        scope: Scope,
        receive: Receive,
        send: Send,
        on_recorded: Callable[[int, int], None] | None = None,
    ) -> None:
        """Forward a request and its reply. If it is recorded, call ``on_recorded`` with its number and record offset.

        Raises ``EngineUnavailable`` if the engine does not answer.
        """
        position = self.writer.reserve()

        def keep(reply: CallReply) -> None:
            if not self._is_kept(request, reply):
                return
            offset = self.writer.put(position, request, _storable(request, reply))
            if offset is not None and on_recorded is not None:
                on_recorded(position.seq, offset)

        await self._upstream.relay(request, scope, receive, send, keep)

    async def ask_facts(self, headers: Headers) -> None:
        """Record the engine's facts about itself as soon as it answers; does nothing once they are recorded.

        ``headers`` are those of a call: if the engine needs a key, the client's key is used.
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
            # The next call asks again, but calls must not wait for this one after another.
            ended_s = time.monotonic()
            self._not_before_s = ended_s + PAUSE_S if ended_s - began_s > PATIENCE_S else 0.0
            return
        self._knows_facts = all(answered)
        if not self._knows_facts:
            self._refused.add(given)
        if workers.status == HTTPStatus.OK:
            logger.warning(IS_ROUTER, self._upstream.url)

    async def _keep_fact(self, path: str, headers: Headers) -> bool:
        """Record one fact. Returns False if the engine refuses these headers."""
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
    """The reply as stored. Facts lose their secrets: SGLang's ``/server_info`` contains the engine's own key."""
    if request.method == "POST":
        return reply
    try:
        value = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return reply
    kept = cleaned(value)
    return reply if kept == value else reply._replace(parts=[(reply.parts[-1][0], msgspec.json.encode(kept))])
