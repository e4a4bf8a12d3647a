"""Streams of the openai package that are recorded while rollout functions read them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from forebay.generators.rollouts.recording import CallRecorder

DRAIN_S = 3.0
"""Limit for reading the rest of a stream after its reader has stopped. Engines need milliseconds to abort a call."""


class RecordedStream(openai.Stream[ChatCompletionChunk]):
    """Stream for rollout functions that run in a thread. Each call has its own subclass, with its ``recorder``."""

    recorder: CallRecorder

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._chunks = super().__stream__()
        self.recorder.note_stream(self)

    def begin(self) -> None:
        """Wait for the first chunk of a call that may be refused there. Raises ``APIError`` if it is."""
        if self.recorder.may_be_refused:
            with self.recorder.reading():
                self._chunks = chain(list(islice(self._chunks, 1)), self._chunks)

    def __stream__(self) -> Iterator[ChatCompletionChunk]:
        with self.recorder.reading():
            for chunk in self._chunks:
                if self.recorder.feed(chunk):
                    yield chunk
            self.recorder.check_begun()
        self.recorder.end_in_thread()
        yield from self.recorder.last_chunks()

    def close(self) -> None:
        """Record the tokens sampled so far, then close like the package does."""
        self.drain()
        super().close()

    def drain(self) -> None:
        """Abort the call and record the rest of the stream. Does nothing at the end of a stream."""
        if self.recorder.stop():
            until_s = time.monotonic() + DRAIN_S
            # ValueError: another thread is still reading. What was read so far is recorded.
            with self.recorder.reading(), suppress(ValueError):
                for chunk in self._chunks:
                    self.recorder.feed(chunk)
                    if time.monotonic() > until_s:
                        break
        self.recorder.end_in_thread()

    async def stop_and_record(self) -> None:
        """Run ``drain`` from the event loop."""
        await asyncio.to_thread(self.drain)


class AsyncRecordedStream(openai.AsyncStream[ChatCompletionChunk]):
    """Stream for ``async`` rollout functions. Each call has its own subclass, with its ``recorder``."""

    recorder: CallRecorder

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._chunks = super().__stream__()
        self.recorder.note_stream(self)

    async def begin(self) -> None:
        """Wait for the first chunk of a call that may be refused there. Raises ``APIError`` if it is."""
        if self.recorder.may_be_refused:
            with self.recorder.reading():
                self._chunks = _with_first(await anext(self._chunks, None), self._chunks)

    async def __stream__(self) -> AsyncIterator[ChatCompletionChunk]:
        with self.recorder.reading():
            async for chunk in self._chunks:
                if self.recorder.feed(chunk):
                    yield chunk
            self.recorder.check_begun()
        await self.recorder.end()
        for chunk in self.recorder.last_chunks():
            yield chunk

    async def close(self) -> None:
        """Record the tokens sampled so far, then close like the package does."""
        await self.stop_and_record()
        await super().close()

    async def stop_and_record(self) -> None:
        """Abort the call and record the rest of the stream. Does nothing at the end of a stream."""
        if self.recorder.stop():
            # RuntimeError: another task is still reading. What was read so far is recorded.
            with self.recorder.reading(), suppress(TimeoutError, RuntimeError):
                async with asyncio.timeout(DRAIN_S):
                    async for chunk in self._chunks:
                        self.recorder.feed(chunk)
        await self.recorder.end()


async def _with_first(
    first: ChatCompletionChunk | None, rest: AsyncIterator[ChatCompletionChunk]
) -> AsyncIterator[ChatCompletionChunk]:
    if first is not None:
        yield first
    async for chunk in rest:
        yield chunk
