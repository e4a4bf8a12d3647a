"""The native routes of SGLang beside the chat: generation by token ids, pauses, weights, tokens."""

from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from forebay.core.errors import ForebayError, InvalidInput
from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.request_bodies import (
    AbortBody,
    DetokenizeBody,
    GenerateBody,
    JSONObject,
    PauseBody,
    TokenizeBody,
    VersionBody,
    WeightsBody,
    event,
    generate_error,
)
from forebay.engines.tiny.running import CallStream, collect, growing, running
from forebay.engines.tiny.service import Service, service_of

router = APIRouter()


@router.post("/generate")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Go on from a text or from token ids, or from each of a list; a client that goes away ends it."""
    service = service_of(request)
    calls = await service.prepare_generate(body)
    if body.stream:
        return CallStream(_stream(service, request, calls[0], body), service, calls[0])
    with running(service, request, calls):
        told = [service.told(call, choice, body) for call in calls for choice in await collect(call)]
    return JSONResponse(told if body.is_list or len(told) > 1 else told[0])


@router.post("/abort_request")
async def abort_request(body: AbortBody, request: Request) -> Response:
    """End calls by the beginning of their ``rid``, or all; they answer 200 with what they have."""
    if body.abort_all:
        service_of(request).thread.abort_all()
    elif body.rid:
        service_of(request).thread.abort(body.rid)
    return Response()


@router.post("/pause_generation")
async def pause_generation(body: PauseBody, request: Request) -> JSONObject:
    """Generate nothing until ``/continue_generation``; see ``GenerationThread.pause`` for the modes."""
    await service_of(request).thread.pause(body.mode)
    return {"message": "Generation paused successfully.", "status": "ok"}


@router.post("/continue_generation")
async def continue_generation(request: Request) -> JSONObject:
    """Go on after a pause."""
    await service_of(request).thread.resume()
    return {"message": "Generation continued successfully.", "status": "ok"}


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: WeightsBody, request: Request) -> Response:
    """Go on with the weights in another folder. Calls in flight keep what they have, and go on with them.

    SGLang 0.5.23 does this only while it is paused, and else waits until nothing is in flight; in both
    ``abort_all_requests`` ends the calls first. A folder that does not fit is a 400, and the weights stay as they are.
    """
    thread = service_of(request).thread
    if body.abort_all_requests:
        thread.abort_all()
    told = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    try:
        await thread.update_weights(Path(body.model_path), body.weight_version)
    except InvalidInput as error:
        return JSONResponse({**told, "success": False, "message": error.message}, status_code=400)
    return JSONResponse(told)


@router.post("/update_weight_version")
async def update_weight_version(body: VersionBody, request: Request) -> JSONObject:
    """Call the weights something else from the next token on."""
    thread = service_of(request).thread
    if body.abort_all_requests:
        thread.abort_all()
    await thread.name_weights(body.new_version)
    told = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": told, "new_version": body.new_version}


@router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Forget the prompts that were read."""
    await service_of(request).thread.forget_prompts()
    return Response()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> JSONObject:
    """The tokens of a text or of a chat's prompt."""
    return await service_of(request).tokenize(body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> JSONObject:
    """The text of tokens."""
    return await service_of(request).detokenize(body)


async def _stream(service: Service, request: Request, call: Call, body: GenerateBody) -> AsyncIterator[str]:
    try:
        with running(service, request, [call]):
            async for index, choice in growing(call):
                told = service.told(call, choice, body)
                yield event(told if call.n == 1 else {**told, "index": index})
    except ForebayError as error:
        yield event(generate_error(error.message, error.status))
    yield event("[DONE]")
