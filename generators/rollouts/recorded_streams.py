"""The streams that rollout functions read: those of the openai package, recorded as they are read."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from forebay.generators.rollouts.recording import CallRecorder

DRAIN_S = 3.0
"""How long the rest of a stream is read after its reader has stopped: an engine that stops it needs milliseconds."""


class RecordedStream(openai.Stream[ChatCompletionChunk]):
    """For rollout functions that run in a thread. Each call has a class of its own, with its ``recorder``."""

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
        """As in the package; before that, the engine tells the tokens that it has sampled."""
        self.drain()
        super().close()

    def drain(self) -> None:
        """Stop the call, and read what its engine still tells; nothing at the end of a stream."""
        if self.recorder.stop():
            until_s = time.monotonic() + DRAIN_S
            # A ValueError: the reader is still at it, in another thread. What was read so far counts.
            with self.recorder.reading(), suppress(ValueError):
                for chunk in self._chunks:
                    self.recorder.feed(chunk)
                    if time.monotonic() > until_s:
                        break
        self.recorder.end_in_thread()

    async def stop_and_record(self) -> None:
        """``drain`` from the event loop."""
        await asyncio.to_thread(self.drain)


class AsyncRecordedStream(openai.AsyncStream[ChatCompletionChunk]):
    """For ``async`` rollout functions. Each call has a class of its own, with its ``recorder``."""

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
        """As in the package; before that, the engine tells the tokens that it has sampled."""
        await self.stop_and_record()
        await super().close()

    async def stop_and_record(self) -> None:
        """Stop the call, and read what its engine still tells; nothing at the end of a stream."""
        if self.recorder.stop():
            # A RuntimeError: the reader is still at it, in another task. What was read so far counts.
            with self.recorder.reading(), suppress(TimeoutError, RuntimeError):
                async with asyncio.timeout(DRAIN_S):
                    async for chunk in self._chunks:
                        self.recorder.feed(chunk)
        await self.recorder.end()
