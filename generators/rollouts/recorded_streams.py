"""Streams of the openai package that are recorded while rollout functions read them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
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
