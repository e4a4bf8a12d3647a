"""The routes of the embedded engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

from forebay.core.errors import ForebayError, InvalidInput
from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.reply import Choice, ReplyWriter
from forebay.engines.tiny.service import Service
from forebay.engines.tiny.wire import AbortBody, ChatBody, JSONObject, WeightsBody, error_body

router = APIRouter()


def create_app(service: Service) -> FastAPI:
    """The application that answers for one model; it starts and stops the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(title="Forebay's embedded engine", lifespan=lifespan)
    app.state.service = service
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(ForebayError, _tell_error)
    return app


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat; a client that goes away ends it."""
    service = _service(request)
    call = await service.prepare(body)
    reply = service.reply_writer(call, body)
    if call.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_stream(request, call, reply, with_usage), media_type="text/event-stream")
    with _running(request, call):
        choices = await _collect(call)
    return JSONResponse(reply.whole(choices, service.thread.weights.version))


@router.post("/abort_request")
async def abort_request(body: AbortBody, request: Request) -> Response:
    """End calls by the beginning of their ``rid``, or all; they answer 200 with what they have."""
    if body.abort_all:
        _service(request).thread.abort_all()
    elif body.rid:
        _service(request).thread.abort(body.rid)
    return Response()


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: WeightsBody, request: Request) -> Response:
    """Go on with the weights in another folder. Calls in flight keep what they have, and go on with them.

    SGLang 0.5.23 ends them unless told not to; here ``abort_all_requests`` asks for that. A folder that does not fit is
    a 400, and the weights stay as they are.
    """
    thread = _service(request).thread
    if body.abort_all_requests:
        thread.abort_all()
    told = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    try:
        await thread.update_weights(Path(body.model_path), body.weight_version)
    except InvalidInput as error:
        return JSONResponse({**told, "success": False, "message": error.message}, status_code=400)
    return JSONResponse(told)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while calls are answered, else 503."""
    return Response(status_code=200 if _service(request).thread.is_alive else 503)


@router.get("/model_info")
async def model_info(request: Request) -> JSONObject:
    """What is served, as SGLang tells it."""
    return _service(request).model_info()


@router.get("/v1/models")
async def models(request: Request) -> JSONObject:
    """The one model, as OpenAI lists it."""
    return _service(request).models()


@router.get("/v1/loads")
async def loads(request: Request) -> JSONObject:
    """How busy the engine is, as SGLang tells it."""
    return _service(request).loads()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _collect(call: Call) -> list[Choice]:
    choices = [Choice() for _ in range(call.n)]
    async for piece in call.read():
        choices[piece.index].add(piece)
    return choices


async def _stream(request: Request, call: Call, reply: ReplyWriter, with_usage: bool) -> AsyncIterator[str]:
    choices = [Choice() for _ in range(call.n)]
    try:
        with _running(request, call):
            for index in range(call.n):
                yield _event(reply.opening(index))
            async for piece in call.read():
                choices[piece.index].add(piece)
                yield _event(reply.grown(piece))
    except ForebayError as error:
        yield _event(error_body(error.message, error.status, code=error.code))
    if with_usage:
        yield _event(reply.closing(choices))
    yield "data: [DONE]\n\n"


def _event(body: JSONObject) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


@contextmanager
def _running(request: Request, call: Call) -> Iterator[None]:
    """Submit the call; a client that goes away ends it, and so does leaving the block."""
    thread = _service(request).thread

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        thread.cancel(call)

    thread.submit(call)
    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        thread.cancel(call)


async def _refuse_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The first part says "body", which the caller knows; a position in broken JSON is no field.
    field = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid")
    told = f"{field}: {first['msg']}" if field else str(first["msg"])
    return JSONResponse(error_body(told, 400, param=field or None), status_code=400)


async def _tell_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    # OpenAI's clients know a refused request as 400, where Forebay's own routes say 422.
    status = 400 if isinstance(error, InvalidInput) else error.status
    return JSONResponse(error_body(error.message, status, param=error.field, code=error.code), status_code=status)
