"""The application of the embedded engine: the chat, what it tells about itself, and errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from forebay.core.errors import ForebayError, InvalidInput
from forebay.engines.tiny import native
from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.reply_bodies import Choice, ReplyWriter
from forebay.engines.tiny.request_bodies import ChatBody, JSONObject, error_body, event, generate_error
from forebay.engines.tiny.running import CallStream, collect, running
from forebay.engines.tiny.service import Service, service_of

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
    app.include_router(native.router)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(ForebayError, _tell_error)
    return app


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat; a client that goes away ends it."""
    service = service_of(request)
    call = await service.prepare(body)
    reply = service.reply_writer(call, body)
    if call.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return CallStream(_stream(request, call, reply, with_usage), service, call)
    with running(service, request, [call]):
        choices = await collect(call)
    return JSONResponse(reply.whole(choices, service.thread.weights.version))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while calls are answered, else 503."""
    return Response(status_code=200 if service_of(request).thread.is_alive else 503)


@router.get("/model_info")
async def model_info(request: Request) -> JSONObject:
    """What is served, as SGLang tells it."""
    return service_of(request).model_info()


@router.get("/v1/models")
async def models(request: Request) -> JSONObject:
    """The one model, as OpenAI lists it."""
    return service_of(request).models()


@router.get("/v1/loads")
async def loads(request: Request) -> JSONObject:
    """How busy the engine is, as SGLang tells it."""
    return service_of(request).loads()


async def _stream(request: Request, call: Call, reply: ReplyWriter, with_usage: bool) -> AsyncIterator[str]:
    choices = [Choice() for _ in range(call.n)]
    try:
        with running(service_of(request), request, [call]):
            for index in range(call.n):
                yield event(reply.opening(index))
            async for piece in call.read():
                choices[piece.index].add(piece)
                for chunk in reply.grown(piece):
                    yield event(chunk)
    except ForebayError as error:
        yield event({"error": error_body(error.message, error.status)})
    for chunk in reply.closing(choices, with_usage=with_usage):
        yield event(chunk)
    yield event("[DONE]")


async def _refuse_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The first part says "body", which the caller knows; a position in broken JSON is no field.
    field = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid")
    return _error(request, f"{field}: {first['msg']}" if field else str(first["msg"]), 400, field or None)


async def _tell_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    # OpenAI's clients know a refused request as 400, where Forebay's own routes say 422.
    status = 400 if isinstance(error, InvalidInput) else error.status
    return _error(request, error.message, status, error.field)


def _error(request: Request, message: str, status: int, field: str | None) -> Response:
    native = request.url.path == "/generate"
    body = generate_error(message, status) if native else error_body(message, status, param=field)
    return JSONResponse(body, status_code=status)
