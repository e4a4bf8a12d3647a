"""A streamed call of an agent: its own task reads it to the end, forwards it chunk by chunk, and records it.

Two tasks share a ``ChunkQueue``: one reads the engine, feeds the record and fills the queue; the agent's request
empties it. So the record contains the end of the stream even if the agent is slow or gone.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from forebay.core.errors import EngineUnavailable
from forebay.engines.capture.call_spans import versions_of
from forebay.engines.capture.fill_gaps import complete
from forebay.engines.capture.fill_rows import with_prompt_rows
from forebay.engines.capture.reply_shape import check_has_choice, read_chunk
from forebay.engines.capture.turn import Turn
from forebay.gateway.calls import EngineCall, Json, RowsRefused
from forebay.gateway.engine_http import DONE_DATA
from forebay.gateway.engine_request import EngineRequest
from forebay.gateway.off_loop import off_loop_if
from forebay.gateway.recording import CallRecording, StreamRecording
from forebay.gateway.refusals import EngineLost
from forebay.telemetry.tracing.spans import SpanHandle

DRAIN_S = 3.0
"""Seconds to read the rest of a stream after its agent has gone: SGLang ends an aborted one within milliseconds."""


class ChunkQueue:
    """Chunks that wait to be forwarded, so that a slow agent delays neither the reader nor the engine."""

    def __init__(self) -> None:
        self.is_begun = False
        """Whether there was any chunk."""
        self._chunks: list[Json] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, chunk: Json) -> None:
        """Add a chunk."""
        self.is_begun = True
        self._chunks.append(chunk)
        self._changed.set()

    def close(self, *_: object) -> None:
        """Mark the end of the stream."""
        self._is_closed = True
        self._changed.set()

    async def take(self) -> list[Json]:
        """Wait for chunks and return all that arrived since the last call. Empty at the end."""
        await self._changed.wait()
        taken, self._chunks = self._chunks, []
        if not self._is_closed:
            self._changed.clear()
        return taken


@dataclass(frozen=True, slots=True)
class _OpenStream:
    """A stream that an engine is sending."""

    recording: StreamRecording
    request: EngineRequest


class ChatCall(EngineCall):
    """One call of a session. Use it once: with ``whole``, ``stream`` or ``other``."""

    _limit: asyncio.Timeout
    _open: _OpenStream | None = None

    async def stream(self, body: Json) -> AsyncGenerator[list[Json], None]:
        """Yield the chunks of the answer to a chat, in batches of those that have arrived.

        Raises as ``whole`` does; ``EngineLost`` and ``Over`` also in the middle. If the generator is closed early, the
        engine is stopped, and the tokens sampled by then are recorded.
        """
        queue = ChunkQueue()
        reading = asyncio.create_task(self._read(await self._recording(body), queue))
        reading.add_done_callback(queue.close)
        reading.add_done_callback(_retrieve_error)
        try:
            while chunks := await queue.take():
                yield chunks
            await reading
        finally:
            if not reading.done():
                self._leave(reading)

    def _leave(self, reading: "asyncio.Task[None]") -> None:
        """Stop the stream, because the agent is gone."""
        self.is_left = True
        if self._open is None:
            reading.cancel()
            return
        self._open.recording.stop()
        target = self._open.request.target
        self._run.abandon(target.url, self._open.request.rid)
        # An aborted stream of SGLang ends with the ids of all its tokens, so reading continues until then.
        self.session.leave(self._limit, DRAIN_S if target.dialect.has_gaps else 0.0)

    async def _read(self, recording: CallRecording, queue: ChunkQueue) -> None:
        async with self._counted() as self._limit:
            while True:
                try:
                    opened = await self._read_once(recording, queue)
                except RowsRefused:
                    continue
                except EngineUnavailable as error:
                    self._open = None
                    await self._wait_before_retry(error, is_begun=queue.is_begun)
                else:
                    break
            self._open = None
            await self._end(recording, opened, queue)

    async def _read_once(self, recording: CallRecording, queue: ChunkQueue) -> _OpenStream:
        async with self._sent(recording) as request:
            stream = await off_loop_if(recording.is_large, lambda: StreamRecording(recording, request))
            self._open = _OpenStream(stream, request)
            try:
                async for data in request.reply.events():
                    if data != DONE_DATA and (chunk := stream.feed(_chunk(data))) is not None:
                        queue.put(chunk)
                request.span.note_answer()
                if not self.is_left:
                    check_has_choice(stream.is_begun)
            except asyncio.CancelledError:
                # SGLang's turns need the end of the stream; for other engines, record what was read so far.
                if self.is_left and not request.target.dialect.has_gaps:
                    self.choices = begun = _begun(stream.turns())
                    request.span.end(begun)
                    self.turns.add(self._run.pool.judged(request.key, begun))
                raise
            return self._open

    async def _end(self, recording: CallRecording, opened: _OpenStream, queue: ChunkQueue) -> None:
        """Record the stream and forward its last chunks."""
        stream = opened.recording
        self.choices = seen = await off_loop_if(recording.is_large, stream.turns)
        opened.request.span.end(seen)
        self._check_cap(seen, opened.request)
        completed = self._completed(opened.request, _begun(seen) if self.is_left else seen)
        if any(map(self._must_continue, seen)):
            seen = await completed
            turns, logprobs = await self._finished(recording, seen)
            self.turns.add(turns)
            await self._answered(recording, turns)
            last = stream.end(seen, turns, logprobs)
        else:
            # Completing the record takes an engine's time, and the agent does not wait for it.
            self.turns.add_later(completed)
            await self._answered(recording, seen)
            last = stream.end(seen, seen, {})
        for chunk in last:
            queue.put(chunk)

    async def _completed(self, request: EngineRequest, turns: list[Turn]) -> list[Turn]:
        """Complete the turns with what SGLang omits in a stream: versions, and logprobs of tokens without text."""
        pool, turn = self._run.pool, self._up
        if not request.target.dialect.has_gaps or not turns:
            return pool.judged(request.key, turns)
        url = request.target.url
        versions = (request.weight_version, await self._run.versions.after(url, pool.weight_version))
        completed = await complete(pool.http, url, turns, versions, extra_key=request.extra_key)
        if isinstance(turn, SpanHandle):
            turn.set(versions=versions_of(completed))  # also after its end, for the rollout's summary
        if (recorded := self.recorded) is not None:
            completed = await with_prompt_rows(pool.http, recorded, completed, extra_key=request.extra_key)
        return pool.judged(request.key, completed)


def _begun(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of which anything was read."""
    return [turn for turn in turns if turn.sampled_ids or (turn.sampled_ids is None and turn.reply.get("content"))]


def _retrieve_error(reading: "asyncio.Task[None]") -> None:
    # The record has the error of a call that is not awaited: asyncio must not log it as never retrieved.
    if not reading.cancelled():
        reading.exception()


def _chunk(data: bytes) -> Json:
    """Decode one event. Raises ``EngineLost`` for an error of the engine, ``EngineError`` for a malformed chunk."""
    chunk = read_chunk(data)
    if chunk.get("error"):
        raise EngineLost(f"the engine ended the stream: {chunk['error']!r:.500}")
    return chunk
