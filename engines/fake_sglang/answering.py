"""One request from its calls to its reply: they run as long as a client waits for them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from forebay.core.errors import EngineError, InvalidInput
from forebay.engines.fake_sglang.backend import Backend
from forebay.engines.fake_sglang.calls import PromptCall, choices_of, grow
from forebay.engines.fake_sglang.reply_bodies import ReplyWriter
from forebay.web.replies import encode, until_gone

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class CallsInFlight:
    """The calls that a back end works on, by their ids, and the replies that they come to."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._calls: dict[str, PromptCall] = {}

    async def answer(self, request: Request, calls: Sequence[PromptCall], writer: ReplyWriter) -> Response:
        """The reply, whole or as a stream. Raises ``InvalidInput`` for an id in use, and what the back end fails of."""
        if calls[0].stream:
            events = self._events(request, calls, writer)
            # SGLang sends no headers before there is something to say, so that what fails first is an HTTP error.
            return _EventStream(await anext(events), events)
        choices = choices_of(calls)
        with self._submitted(request, calls):
            async for _ in grow(choices):
                pass
        return JSONResponse(writer.whole(choices))

    async def _events(
        self, request: Request, calls: Sequence[PromptCall], writer: ReplyWriter
    ) -> AsyncGenerator[bytes, None]:
        choices, has_begun = choices_of(calls), False
        with self._submitted(request, calls):
            try:
                async for choice, piece in grow(choices):
                    for chunk in writer.grown(choice, piece):
                        has_begun = True
                        yield _event(chunk)
            except EngineError as error:
                # Later the status is out already, and the error can only be an event.
                if not has_begun:
                    raise
                yield _event(writer.failed(error.message, error.status_code or error.status))
        for chunk in writer.closing(choices):
            yield _event(chunk)
        yield DONE

    @contextmanager
    def _submitted(self, request: Request, calls: Sequence[PromptCall]) -> Iterator[None]:
        """Have the calls run; a client that goes away ends them, and so does leaving the block."""
        # Outside of the `try`: a duplicate must not free the id of the call that has it.
        self._reserve(calls)
        watcher = asyncio.create_task(_tell_departure(request, calls[0]))
        try:
            for call in calls:
                self._backend.submit(call)
            yield
        finally:
            watcher.cancel()
            for call in calls:
                del self._calls[call.rid]
                self._backend.cancel(call)

    def _reserve(self, calls: Sequence[PromptCall]) -> None:
        # Two calls of one list under one id are a duplicate as well: the later one takes the place in `new`.
        new = {call.rid: call for call in calls}
        for call in calls:
            if call.rid in self._calls or new[call.rid] is not call:
                raise InvalidInput(f"Duplicate request ID detected: {call.rid}", field="rid")
        self._calls |= new
        for call in calls:
            logger.debug("call %s, traceparent %s", call.rid, call.traceparent)


class _EventStream(StreamingResponse):
    """The events of a request, which end with it, also where the client goes away before it reads the first."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_chained(first, rest), media_type="text/event-stream")
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A generator that nobody iterates any more would hold the calls and their ids until it is collected.
            await self._rest.aclose()


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for event in rest:
        yield event


async def _tell_departure(request: Request, call: PromptCall) -> None:
    await until_gone(request.receive)
    call.pieces.put_nowait(None)


def _event(body: object) -> bytes:
    return b"data: " + encode(body) + b"\n\n"
