"""A streamed call of an agent: read to its end by a task of its own, passed on as it comes, recorded.

The way of a stream's chunks from the task that reads them to the one that passes them on.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from forebay.core.errors import EngineUnavailable
from forebay.engines.capture.fill_gaps import complete
from forebay.engines.capture.turn import Turn
from forebay.gateway.calls import EngineCall, Json
from forebay.gateway.engine_http import DONE_DATA
from forebay.gateway.engine_request import Sent
from forebay.gateway.recording import StreamWire, Wire
from forebay.gateway.refusals import EngineLost


class Outlet:
    """Chunks that wait to be passed on: a slow agent does not hold up the reading, nor the engine."""

    def __init__(self) -> None:
        self.is_begun = False
        """Whether there was a chunk."""
        self._chunks: list[Json] = []
        self._news = asyncio.Event()
        self._is_closed = False

    def put(self, chunk: Json) -> None:
        """Add a chunk."""
        self.is_begun = True
        self._chunks.append(chunk)
        self._news.set()

    def close(self, *_: object) -> None:
        """There will be no more."""
        self._is_closed = True
        self._news.set()

    async def take(self) -> list[Json]:
        """All chunks that have come since the last time; waits for one. Empty at the end."""
        await self._news.wait()
        taken, self._chunks = self._chunks, []
        if not self._is_closed:
            self._news.clear()
        return taken


DRAIN_S = 3.0
"""How long the rest of a stream is read after its agent has gone: an engine that was told needs milliseconds."""

_decode = msgspec.json.Decoder(Json).decode


@dataclass(frozen=True, slots=True)
class _Open:
    """A stream that an engine is answering with."""

    wire: StreamWire
    sent: Sent


class ChatCall(EngineCall):
    """One call of a session. Use it once: with ``whole``, ``stream`` or ``other``."""

    _limit: asyncio.Timeout
    _open: _Open | None = None

    async def stream(self, told: Json) -> AsyncGenerator[list[Json], None]:
        """The chunks of the answer to the chat ``told``, those together that have come meanwhile.

        Raises as ``whole`` does, ``EngineLost`` and ``Over`` in the middle too. If it is closed before its end, the
        engine is told to stop, and what it had sampled by then is recorded.
        """
        outlet = Outlet()
        reading = asyncio.create_task(self._read(Wire(told, self.session.prepared(told)), outlet))
        reading.add_done_callback(outlet.close)
        reading.add_done_callback(_ignored)
        try:
            while chunks := await outlet.take():
                yield chunks
            await reading
        finally:
            if not reading.done():
                self._leave(reading)

    def _leave(self, reading: "asyncio.Task[None]") -> None:
        """The agent is gone. Engines other than SGLang are not told so: they have told their tokens so far."""
        self.is_left = True
        if self._open is None:
            reading.cancel()
            return
        self._open.wire.stop()
        target, rid = self._open.sent.target, self._open.sent.rid
        if target.is_sglang:
            self._run.abandon(target.url, rid)
        self.session.leave(self._limit, DRAIN_S if target.is_sglang else 0.0)

    async def _read(self, wire: Wire, outlet: Outlet) -> None:
        async with self._counted() as self._limit:
            while True:
                try:
                    opened = await self._read_once(wire, outlet)
                except EngineUnavailable as error:
                    self._open = None
                    await self._stand(error, is_begun=outlet.is_begun)
                else:
                    break
            self._open = None
            await self._end(wire, opened, outlet)

    async def _read_once(self, wire: Wire, outlet: Outlet) -> _Open:
        async with self._sent(wire) as sent:
            stream = StreamWire(wire, sent.rid, sent.target.url, sent.began_s)
            self._open = _Open(stream, sent)
            try:
                async for data in sent.reply.data():
                    if data != DONE_DATA and (left := stream.feed(_chunk(data))) is not None:
                        outlet.put(left)
            except asyncio.CancelledError:
                if self.is_left and not sent.target.is_sglang:
                    self.session.turns.add(_begun(stream.turns()))
                raise
            return self._open

    async def _end(self, wire: Wire, opened: _Open, outlet: Outlet) -> None:
        """Record the stream, and pass its last chunks on; what is asked for the record alone nobody waits for."""
        stream = opened.wire
        seen = stream.turns()
        completed = self._completed(wire, opened.sent, _begun(seen) if self.is_left else seen)
        if any(map(self._is_to_go_on, seen)):
            seen = await completed
            turns, logprobs = await self._gone_on(wire, seen)
            self.session.turns.add(turns)
            last = stream.end(seen, turns, logprobs)
        else:
            self.session.turns.add_later(completed)
            last = stream.end(seen, seen, {})
        for chunk in last:
            outlet.put(chunk)

    async def _completed(self, wire: Wire, sent: Sent, turns: list[Turn]) -> list[Turn]:
        if not sent.target.is_sglang or not turns:
            return turns
        return await complete(
            self._run.upstream.http,
            sent.target.url,
            turns,
            sent.weight_version,
            temperature=wire.body.get("temperature"),
            extra_key=sent.extra_key,
            version_of=self._version_of,
        )

    async def _version_of(self, _: httpx.AsyncClient, url: str) -> str | None:
        return await self._run.versions.after(url, self._run.ring.weight_version)


def _begun(turns: Sequence[Turn]) -> list[Turn]:
    """Those of which anything was read."""
    return [turn for turn in turns if turn.sampled_ids or (turn.sampled_ids is None and turn.reply.get("content"))]


def _ignored(reading: "asyncio.Task[None]") -> None:
    """What becomes of a call that nobody waits for is told in the record, not in the log."""
    if not reading.cancelled():
        reading.exception()


def _chunk(data: bytes) -> Json:
    """One event of a stream. Raises ``EngineLost`` for an error that the engine tells in the middle."""
    try:
        chunk = _decode(data)
    except msgspec.DecodeError:
        raise EngineLost(f"the engine streams what is no chunk: {data[:200]!r}") from None
    if "error" in chunk:
        raise EngineLost(f"the engine ended the stream: {chunk['error']}")
    return chunk
