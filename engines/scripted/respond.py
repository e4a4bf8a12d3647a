"""Answering one request of a scripted engine: whole, or as a stream while its choices are being said."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from forebay.engines.scripted.play import Work
from forebay.engines.scripted.reply_bodies import ChatWriter, JSONObject, error_body, event, generated
from forebay.engines.scripted.script import ScriptedCall

CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Growth:
    """A choice has said ``num_said`` tokens by now, or has ended with them."""

    call: ScriptedCall
    num_said: int
    is_end: bool


@dataclass(frozen=True, slots=True)
class Form:
    """How the calls of a request are told: in one body, as chunks of each growth, and what closes a stream."""

    whole: Callable[[], object]
    chunks: Callable[[Growth], Iterable[JSONObject]]
    closing: Callable[[], Iterable[JSONObject]]
    opening: Callable[[ScriptedCall], Iterable[JSONObject]]


def chat_form(writer: ChatWriter) -> Form:
    """The form of a chat."""

    def chunks(growth: Growth) -> Iterable[JSONObject]:
        yield from writer.grown(growth.call, growth.num_said)
        if growth.is_end:
            yield from writer.ended(growth.call)

    return Form(writer.whole, chunks, writer.closing, lambda call: [writer.opening(call)])


def generate_form(calls: Sequence[ScriptedCall], *, is_list: bool) -> Form:
    """The form of ``/generate``; the chunks of a stream tell everything so far."""

    def whole() -> object:
        told = [generated(call, len(call.sampled_ids), is_end=True) for call in calls]
        return told if is_list else told[0]

    def chunks(growth: Growth) -> Iterable[JSONObject]:
        told = generated(growth.call, growth.num_said, is_end=growth.is_end)
        yield {**told, "index": growth.call.choice} if is_list else told

    return Form(whole, chunks, lambda: (), lambda _: ())


async def respond(request: Request, work: Work, calls: Sequence[ScriptedCall], form: Form) -> Response:
    """Have the calls answered; a client that goes away ends them."""
    grown: asyncio.Queue[Growth] = asyncio.Queue()

    def tell(call: ScriptedCall) -> None:
        grown.put_nowait(Growth(call, len(call.sampled_ids), call.finished is not None))

    running = asyncio.create_task(work.run(calls, tell))
    gone = asyncio.create_task(_disconnected(request))
    gone.add_done_callback(lambda _: running.cancel())
    if calls[0].body.get("stream"):
        return await _streamed(grown, gone, len(calls), form)
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            # Nobody reads the answer to a client that has gone.
            return Response(status_code=CLIENT_GONE)
        running.result()
        return _failure(calls) or JSONResponse(form.whole())
    finally:
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _streamed(grown: "asyncio.Queue[Growth]", gone: "asyncio.Task[None]", num_calls: int, form: Form) -> Response:
    first = asyncio.create_task(grown.get())
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        gone.cancel()
        raise
    finally:
        first.cancel()
    if gone.done():
        return Response(status_code=CLIENT_GONE)
    growth = first.result()
    failure = _failure([growth.call]) if growth.is_end else None
    if failure is not None:
        gone.cancel()
        return failure
    return StreamingResponse(_events(growth, grown, gone, num_calls, form), media_type="text/event-stream")


async def _events(
    growth: Growth, grown: "asyncio.Queue[Growth]", gone: "asyncio.Task[None]", num_open: int, form: Form
) -> AsyncIterator[bytes]:
    opened: set[ScriptedCall] = set()
    try:
        while True:
            for chunk in _chunks(growth, opened, form):
                yield event(chunk)
            num_open -= growth.is_end
            if not num_open:
                break
            growth = await grown.get()
        for chunk in form.closing():
            yield event(chunk)
        yield event("[DONE]")
    finally:
        gone.cancel()


def _chunks(growth: Growth, opened: set[ScriptedCall], form: Form) -> Iterable[JSONObject]:
    if growth.call not in opened:
        opened.add(growth.call)
        yield from form.opening(growth.call)
    if growth.is_end and growth.call.finished == "error":
        yield {"error": error_body(growth.call.reply.error_status or 500, growth.call.reply.text)}
    else:
        yield from form.chunks(growth)


def _failure(calls: Sequence[ScriptedCall]) -> Response | None:
    """The first error that a script has answered with."""
    replies = (call.reply for call in calls if call.finished == "error")
    reply = next(replies, None)
    if reply is None or reply.error_status is None:
        return None
    return JSONResponse(error_body(reply.error_status, reply.text), reply.error_status)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
