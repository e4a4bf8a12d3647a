"""The routes of a scripted engine, as SGLang 0.5.23 has them."""

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forebay.core.errors import InvalidInput
from forebay.engines.scripted.parsers import REASONING_PARSER, TOOL_CALL_PARSER, parse_function_call, separate_reasoning
from forebay.engines.scripted.play import Work
from forebay.engines.scripted.reply_bodies import ChatWriter, error_body
from forebay.engines.scripted.request_bodies import chat_calls, check_messages, checked_ids, generate_calls, is_batch
from forebay.engines.scripted.respond import chat_form, generate_form, respond
from forebay.engines.scripted.script import Reply, Script, ScriptedCall
from forebay.engines.scripted.tokens import decode, encode, encode_chat

__all__ = ["Reply", "Script", "ScriptedApp", "ScriptedCall"]

PAUSE_MODES = ("abort", "retract", "in_place")


class ScriptedApp:
    """The ASGI application behind a ``ScriptedEngine``."""

    def __init__(self, script: Script, model: str) -> None:
        self.work = Work(script)
        self.available = True
        self.weight_updates: list[dict[str, Any]] = []
        self._model = model
        self._routes = Starlette(routes=self._route_list(), exception_handlers={InvalidInput: _refused})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.available:
            await self._routes(scope, receive, send)
        else:
            await JSONResponse(error_body(503, "the engine is not available"), 503)(scope, receive, send)

    def _route_list(self) -> list[Route]:
        told = {"/v1/models": self._models, "/model_info": self._model_info, "/v1/loads": self._loads}
        asked = {
            "/v1/chat/completions": self._chat,
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._name_weights,
            "/flush_cache": self._health,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/parse_function_call": self._parse_calls,
            "/separate_reasoning": self._separate_reasoning,
        }
        routes = [Route(path, answer) for path, answer in {**told, "/health": self._health}.items()]
        return routes + [Route(path, answer, methods=["POST"]) for path, answer in asked.items()]

    async def _chat(self, request: Request) -> Response:
        body = await _body(request)
        calls = chat_calls(body)
        if self.work.rid_in_flight(body.get("rid")):
            raise InvalidInput(f"Duplicate request ID detected: {body['rid']}", field="rid")
        return await respond(request, self.work, calls, chat_form(ChatWriter(body, calls, self._model)))

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        calls = generate_calls(body)
        return await respond(request, self.work, calls, generate_form(calls, is_list=is_batch(body)))

    async def _abort(self, request: Request) -> Response:
        body = await _body(request)
        prefix = "" if body.get("abort_all") else body.get("rid") or None
        if prefix is not None:
            self.work.abort(prefix)
        return Response(status_code=200)

    async def _pause(self, request: Request) -> Response:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise InvalidInput(f"mode should be one of {', '.join(PAUSE_MODES)}", field="mode")
        await self.work.pause(mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: Request) -> Response:
        self.work.weights.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: Request) -> Response:
        body = await _body(request)
        if not body.get("model_path"):
            raise InvalidInput("model_path is required", field="model_path")
        version = body.get("weight_version")
        await self.work.update(version, aborts=bool(body.get("abort_all_requests")))
        self.weight_updates.append(body)
        told = "Succeeded to update model weights." + (f" Weight version updated to {version}." if version else "")
        return JSONResponse({"success": True, "message": told, "num_paused_requests": 0})

    async def _name_weights(self, request: Request) -> Response:
        version = (await _body(request)).get("new_version")
        if not isinstance(version, str):
            raise InvalidInput("new_version is required", field="new_version")
        self.work.weights.version = version
        told = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": told, "new_version": version})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "forebay"}]})

    async def _model_info(self, _: Request) -> Response:
        path = self.weight_updates[-1]["model_path"] if self.weight_updates else self._model
        info = {"model_path": path, "served_model_name": self._model, "weight_version": self.work.weights.version}
        parsers = {"reasoning_parser": REASONING_PARSER, "tool_call_parser": TOOL_CALL_PARSER}
        return JSONResponse({**info, **parsers, "is_generation": True})

    async def _loads(self, _: Request) -> Response:
        rank = {"dp_rank": 0, "num_running_reqs": self.work.in_flight, "num_waiting_reqs": 0}
        return JSONResponse({"version": "scripted", "loads": [rank]})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def _tokenize(self, request: Request) -> Response:
        body = await _body(request)
        if isinstance(body.get("prompt"), str):
            tokens = encode(body["prompt"])
        elif body.get("messages") is not None:
            check_messages(body["messages"])
            tokens = encode_chat(body["messages"], body.get("tools") or ())
        else:
            raise InvalidInput("prompt or messages is required")
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 2**20})

    async def _detokenize(self, request: Request) -> Response:
        body = await _body(request)
        tokens, with_marks = body.get("tokens"), body.get("skip_special_tokens") is False
        if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
            told = [decode(checked_ids(each), with_marks=with_marks) for each in tokens]
            return JSONResponse({"text": told})
        return JSONResponse({"text": decode(checked_ids(tokens), with_marks=with_marks) if tokens != [] else ""})

    async def _parse_calls(self, request: Request) -> Response:
        return JSONResponse(parse_function_call(await _body(request)))

    async def _separate_reasoning(self, request: Request) -> Response:
        return JSONResponse(separate_reasoning(await _body(request)))


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise InvalidInput(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInput("the body should be a JSON object")
    return body


async def _refused(request: Request, error: Exception) -> Response:
    message = error.message if isinstance(error, InvalidInput) else str(error)
    nested: Mapping[str, Any] = {"error": {"message": message}}
    flat = error_body(400, message)
    return JSONResponse(nested if request.url.path == "/generate" else flat, 400)
