"""Run one request, from its body to its reply, while its client is connected.

Prompts are encoded and checked against the engine's limits; all calls are then submitted to the back end together.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from forebay.core.errors import EngineError, InvalidInput
from forebay.engines.fake_sglang.backend import Backend
from forebay.engines.fake_sglang.calls import Piece, PromptCall, choices_of, grow
from forebay.engines.fake_sglang.reply_bodies import ReplyWriter
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody
from forebay.web.replies import encode, until_gone

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def chat_call(backend: Backend, body: ChatBody, traceparent: str | None = None) -> PromptCall:
    """Return the call of a chat. Raises ``InvalidInput`` if it cannot be served."""
    backend.refuse_unserved(body)
    if body.input_ids is not None:
        prompt_ids: Sequence[int] = body.input_ids
    else:
        # As in SGLang, the flag applies only if the last message is from the assistant.
        is_continued = body.continue_final_message and body.messages[-1].get("role") == "assistant"
        prompt_ids = await backend.encode_chat(body.messages, body.shown_tools, is_continued=is_continued)
    _check_num_choices(backend, body.n or 1)
    field = "messages" if body.input_ids is None else "input_ids"
    return PromptCall(
        rid=body.rid or uuid4().hex,
        prompt_ids=tuple(prompt_ids),
        params=body.sampling(_max_tokens(backend, prompt_ids, body.limit, field)),
        n=body.n or 1,
        stream=bool(body.stream),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        body=body.given,
        is_chat=True,
        extra_key=body.extra_key,
        arrived_s=body.arrived_s,
        traceparent=traceparent,
    )


async def generate_calls(backend: Backend, body: GenerateBody, traceparent: str | None = None) -> list[PromptCall]:
    """Return the calls of ``/generate``, one per prompt. Raises ``InvalidInput`` if one cannot be served."""
    backend.refuse_unserved(body)
    calls: list[PromptCall] = []
    # One queue, so that the stream of a list sends pieces in the order of their arrival.
    pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    first_index = 0
    for at, prompt in enumerate(body.prompts):
        prompt_ids = tuple(await backend.encode(prompt) if isinstance(prompt, str) else prompt)
        params = body.params_of(at)
        _check_num_choices(backend, params.n)
        max_tokens = _max_tokens(backend, prompt_ids, params.max_new_tokens, "input_ids")
        start = body.logprob_start
        calls.append(
            PromptCall(
                rid=body.rid_of(at) or uuid4().hex,
                prompt_ids=prompt_ids,
                params=params.sampling(max_tokens),
                n=params.n,
                first_index=first_index,
                stream=body.stream,
                # A start past the end scores the prompt's last token.
                logprob_start=None if start is None else min(start, len(prompt_ids) - 1),
                body={**body.given, "rid": body.rid_of(at), "sampling_params": params.given},
                extra_key=body.extra_key,
                arrived_s=body.arrived_s,
                traceparent=traceparent,
                pieces=pieces,
            )
        )
        first_index += params.n
    return calls


def check_tokens(backend: Backend, tokens: Sequence[int], field: str) -> None:
    """Raise ``InvalidInput`` for a token outside the vocabulary, which can crash SGLang 0.5.23."""
    if max(tokens, default=0) >= backend.vocabulary_size:
        message = f"token {max(tokens)} is outside this model's vocabulary of {backend.vocabulary_size} tokens"
        raise InvalidInput(message, field=field)


def _check_num_choices(backend: Backend, n: int) -> None:
    if n > backend.max_choices:
        message = f"n must be at most {backend.max_choices} for this engine (got {n})"
        raise InvalidInput(message, field="n")


def _max_tokens(backend: Backend, prompt_ids: Sequence[int], wanted: int | None, field: str) -> int:
    num_prompt = len(prompt_ids)
    room = backend.context_length - num_prompt
    if num_prompt == 0:
        raise InvalidInput("the prompt has no tokens", field=field)
    check_tokens(backend, prompt_ids, field)
    if room < (1 if wanted is None else wanted):
        asked = f"{num_prompt} of prompt{f' and {wanted} to generate' if wanted else ''}"
        raise InvalidInput(
            f"the context of this model is {backend.context_length} tokens; requested: {asked}",
            field=field if room < 1 else "max_tokens",
        )
    return room if wanted is None else wanted


class CallsInFlight:
    """The calls that a back end works on, by id, and their replies."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._calls: dict[str, PromptCall] = {}

    async def answer(self, request: Request, calls: Sequence[PromptCall], writer: ReplyWriter) -> Response:
        """Return the reply, whole or as a stream. Raises ``InvalidInput`` for an id in use, or the back end's error."""
        if calls[0].stream:
            events = self._events(request, calls, writer)
            # Like SGLang, send headers only with the first event, so that earlier failures are HTTP errors.
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
                # After the first chunk the status is already sent, so the error can only be an event.
                if not has_begun:
                    raise
                yield _event(writer.failed(error.message, error.status_code or error.status))
        for chunk in writer.closing(choices):
            yield _event(chunk)
        yield DONE

    @contextmanager
    def _submitted(self, request: Request, calls: Sequence[PromptCall]) -> Iterator[None]:
        """Run the calls until the block ends or the client disconnects."""
        # Before the `try`: a duplicate must not free the id of the call that owns it.
        self._reserve(calls)
        watcher = asyncio.create_task(_end_when_gone(request, calls[0]))
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
        # Two calls with the same id in one list are also duplicates: `new` keeps only the later one.
        new = {call.rid: call for call in calls}
        for call in calls:
            if call.rid in self._calls or new[call.rid] is not call:
                raise InvalidInput(f"Duplicate request ID detected: {call.rid}", field="rid")
        self._calls |= new
        for call in calls:
            logger.debug("call %s, traceparent %s", call.rid, call.traceparent)


class _EventStream(StreamingResponse):
    """The events of a request. Closes the request even if the client disconnects before the first event."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_chained(first, rest), media_type="text/event-stream")
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A generator that is no longer iterated would keep the calls and their ids until it is collected.
            await self._rest.aclose()


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for event in rest:
        yield event


async def _end_when_gone(request: Request, call: PromptCall) -> None:
    await until_gone(request.receive)
    call.pieces.put_nowait(None)


def _event(body: object) -> bytes:
    return b"data: " + encode(body) + b"\n\n"
