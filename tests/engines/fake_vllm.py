"""vLLM's HTTP interface before a scripted engine: the documented shapes of 0.33, as far as Forebay uses them."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.core.errors import EngineUnavailable, InvalidInput
from forebay.engines.fake_sglang.calls import Choice, JSONObject, Piece, PromptCall
from forebay.engines.fake_sglang.reply_bodies import ChatWriter as SGLangChatWriter
from forebay.engines.fake_sglang.reply_bodies import _usage as usage
from forebay.engines.fake_sglang.reply_bodies import error_body, weight_metadata
from forebay.engines.fake_sglang.request_bodies import ChatBody, WeightsBody
from forebay.engines.fake_sglang.requests import CallsInFlight, chat_call
from forebay.engines.fake_sglang.routes import app_of
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.scripted.answers import ScriptedBackend
from forebay.engines.scripted.script import parse_function_call, separate_reasoning
from forebay.engines.scripted.tokens import TURN_END, decode, open_chat

SAMPLING = ("temperature", "top_p", "top_k", "stop", "seed", "ignore_eos", "min_tokens")
CONFIG = {"model": "somewhere else", "generation_config": "vllm", "logprobs_mode": "raw_logprobs"}


class FakeVLLM(ScriptedEngine):
    """A scripted engine that speaks as vLLM does. ``dev_mode`` and ``scale_out`` are the flags of its start."""

    dev_mode = True
    scale_out = True

    def _face(self) -> ASGIApp:
        return app_of(VLLMFace(self, self._backend).routes())


class RenderLater(FakeVLLM):
    """The first request to render a chat loses its connection."""

    def _face(self) -> ASGIApp:
        face, is_lost = super()._face(), []

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"].endswith("/render") and not is_lost:
                is_lost.append(True)
                # Half an answer: the server closes the connection, and its client gets an error.
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
                await send({"type": "http.response.body", "body": b"{", "more_body": True})
                raise ConnectionAbortedError
            await face(scope, receive, send)

        return answer


class VLLMFace:
    """vLLM's routes."""

    def __init__(self, engine: FakeVLLM, backend: ScriptedBackend) -> None:
        self._engine = engine
        self._backend = backend
        self._in_flight = CallsInFlight(backend)
        self._rids: dict[str, str] = {}
        """The client's id of each call in flight, by vLLM's own."""

    def routes(self) -> list[Route]:
        """Each with the status that it has without its flag."""
        return [
            self._route("GET /version", self.version),
            self._route("GET /health", self.done),
            self._route("GET /v1/models", self.models),
            self._route("GET /metrics", self.metrics),
            self._route("POST /v1/chat/completions", self.chat),
            self._route("POST /detokenize", self.detokenize),
            self._route("GET /server_info", self.server_info, 404),
            self._route("GET /weight_info", self.weight_info, 404),
            self._route("GET /is_paused", self.done, 404),
            self._route("POST /pause", self.pause, 404),
            self._route("POST /resume", self.resume, 404),
            self._route("POST /abort_requests", self.abort, 404),
            self._route("POST /reset_prefix_cache", self.done, 404),
            self._route("POST /collective_rpc", self.reload, 404),
            self._route("POST /update_weight_version", self.name_weights, 404),
            self._route("POST /inference/v1/abort_requests", self.abort, 403),
            self._route("POST /inference/v1/generate", self.generate, 403),
            self._route("POST /v1/chat/completions/render", self.render, 403),
            self._route("POST /v1/chat/completions/derender", self.derender, 403),
        ]

    def _route(self, name: str, endpoint: Callable[[Request], Awaitable[Response]], disabled: int = 0) -> Route:
        method, _, path = name.partition(" ")

        async def served(request: Request) -> Response:
            is_on = {0: True, 404: self._engine.dev_mode, 403: self._engine.scale_out}[disabled]
            return await endpoint(request) if is_on else JSONResponse(error_body("disabled", disabled), disabled)

        return Route(path, served, methods=[method])

    # --- calls

    async def chat(self, request: Request) -> Response:
        given = await request.json()
        return await self._answer(request, given, f"chatcmpl-{given.get('request_id')}", ChatWriter)

    async def generate(self, request: Request) -> Response:
        given = await request.json()
        messages, _ = open_chat(given["token_ids"]) or ([], "")
        chat = {**given["sampling_params"], "messages": messages or [{}], "input_ids": given["token_ids"]}
        chat |= {name: given.get(name) for name in ("request_id", "cache_salt", "return_token_ids")}
        chat["logprobs"] = chat.get("logprobs") is not None
        return await self._answer(request, chat, f"generate-tokens-{given['request_id']}", GenerateWriter)

    async def _answer(
        self, request: Request, given: JSONObject, own_id: str, kind: "type[ChatWriter | GenerateWriter]"
    ) -> Response:
        salt = given.get("cache_salt")
        if salt is not None and (not salt or len(salt) > 128 or set(salt) & set("@/\\")):
            raise InvalidInput("Parameter 'cache_salt' must be at most 128 characters", field="cache_salt")
        if self._engine.paused == "abort":
            raise EngineUnavailable("the engine is paused", status_code=503)
        body, call = await self._call(request, given, own_id)
        self._rids[own_id] = str(given.get("request_id"))
        return await self._in_flight.answer(request, [call], kind(given, body, call, self._backend))

    async def _call(self, request: Request, given: JSONObject, own_id: str = "") -> tuple[ChatBody, PromptCall]:
        known = {name: value for name, value in given.items() if name != "return_token_ids"}
        body = ChatBody.model_validate(known)
        call = await chat_call(self._backend, body, request.headers.get("traceparent"))
        call.rid, call.body = own_id, {**given, "rid": given.get("request_id"), "own_id": own_id}
        return body, call

    async def render(self, request: Request) -> Response:
        given = await request.json()
        _, call = await self._call(request, given)
        params = {name: given[name] for name in SAMPLING if name in given}
        # As vLLM does it, without what is its default.
        params |= {} if call.params.max_tokens == 16 else {"max_tokens": call.params.max_tokens}
        params |= {"logprobs": 0 if given.get("logprobs") else None}
        made = {"request_id": f"chatcmpl-{given.get('request_id')}", "token_ids": call.prompt_ids}
        return JSONResponse({**made, "sampling_params": params, "cache_salt": given.get("cache_salt")})

    async def derender(self, request: Request) -> Response:
        given = await request.json()
        (choice,), chat = given["generate_response"]["choices"], given["chat_request"]
        ids, is_stopped = choice["token_ids"], choice["finish_reason"] == "stop"
        text = decode(ids[:-1] if is_stopped and ids[-1] == TURN_END else ids)
        stops = chat.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0] if is_stopped else text
        split = separate_reasoning({"text": text})
        parsed = parse_function_call({"text": split["text"]}) if chat.get("tools") else {}
        calls = [
            {"id": f"call-{at}", "type": "function", "function": {"name": c["name"], "arguments": c["parameters"]}}
            for at, c in enumerate(parsed.get("calls") or [])
        ]
        message = {"role": "assistant", "content": parsed.get("normal_text", split["text"]), "tool_calls": calls}
        message["reasoning"] = split["reasoning_text"]
        return JSONResponse({"id": "joined", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": decode((await request.json())["tokens"], with_marks=True)})

    async def abort(self, request: Request) -> Response:
        ids = (await request.json()).get("request_ids")
        rids = {self._rids[each] for each in ids or self._rids if each in self._rids}
        self._backend.aborts.extend(rids)
        for choice in self._backend._running:
            if choice.rid in rids:
                choice.aborted.set()
        return Response()

    # --- administration

    async def done(self, _: Request) -> Response:
        return JSONResponse({"success": True})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.33.0"})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._backend.name, "owned_by": "vllm"}]})

    async def metrics(self, _: Request) -> Response:
        load, label = self._backend.load(), f'{{engine="0",model_name="{self._backend.name}"}}'
        lines = [f"vllm:num_requests_{name}{label} {load[f'num_{name}_reqs']}.0" for name in ("running", "waiting")]
        return Response("# TYPE vllm:num_requests_running gauge\n" + "\n".join(lines) + "\n", media_type="text/plain")

    async def server_info(self, _: Request) -> Response:
        return JSONResponse({"vllm_config": {"model_config": CONFIG | self._engine.started_with}})

    async def weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self._backend.weight_version})

    async def pause(self, request: Request) -> Response:
        await self._backend.pause("in_place" if request.query_params["mode"] == "keep" else "abort")
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        await self._backend.resume()
        return JSONResponse({"status": "resumed"})

    async def reload(self, request: Request) -> Response:
        given = await request.json()
        assert given["method"] == "reload_weights"
        await self._backend.update_weights(WeightsBody(model_path=given["kwargs"]["weights_path"]))
        self._backend.weight_updates[-1] = {"model_path": given["kwargs"]["weights_path"]}
        return JSONResponse({"results": [None]})

    async def name_weights(self, request: Request) -> Response:
        await self._backend.name_weights((await request.json())["new_version"])
        return JSONResponse({"success": True})


class ChatWriter(SGLangChatWriter):
    """Writes the reply to a chat."""

    def __init__(self, given: JSONObject, body: ChatBody, call: PromptCall, backend: ScriptedBackend) -> None:
        super().__init__(body, call, backend)
        self._given = given
        self._begun: set[Choice] = set()

    def whole(self, choices: Sequence[Choice]) -> JSONObject:
        body = {**self._head("chat.completion"), "choices": list(map(self._choice, choices)), "usage": usage(choices)}
        return body | self._prompt()

    def grown(self, choice: Choice, piece: Piece) -> Iterator[JSONObject]:
        head, options = self._head("chat.completion.chunk"), self._given.get("stream_options") or {}
        told_usage = {"usage": usage([choice])} if options.get("continuous_usage_stats") else {}
        if choice not in self._begun:
            self._begun.add(choice)
            opening = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield {**head, "choices": [opening], **self._prompt()}
        delta: JSONObject = {"content": piece.text} if piece.text else {}
        delta |= {"reasoning": piece.reasoning} if piece.reasoning else {}
        if piece.tool_calls:
            delta["tool_calls"] = [{**each, "index": at} for at, each in enumerate(piece.tool_calls)]
        told = self._told(choice, piece.tokens, is_last=piece.finish_reason is not None)
        grown = {"index": choice.index, "delta": delta, "finish_reason": piece.finish_reason, **told}
        yield {**head, "choices": [grown], **told_usage}

    def _choice(self, choice: Choice) -> JSONObject:
        message = {"role": "assistant", "content": choice.text, "reasoning": choice.reasoning or None}
        message |= {"tool_calls": list(choice.tool_calls)}
        told = self._told(choice, choice.tokens, is_last=True)
        return {"index": choice.index, "message": message, "finish_reason": choice.finish_reason, **told}

    def _told(self, choice: Choice, tokens: Sequence[Any], *, is_last: bool) -> JSONObject:
        """What a choice tells of its tokens."""
        told: JSONObject = {"logprobs": self._logprobs(tokens), "stop_reason": None}
        if self._given.get("return_token_ids"):
            told["token_ids"] = [token.token_id for token in tokens]
        if self._given.get("return_weight_versions") and is_last:
            told["weight_versions"] = weight_metadata(choice.versions, self._backend.weight_version)["weight_versions"]
        return told

    def _prompt(self) -> JSONObject:
        return {"prompt_token_ids": self._call.prompt_ids} if self._given.get("return_token_ids") else {}


class GenerateWriter(ChatWriter):
    """Writes the reply of ``/inference/v1/generate``, which always tells the versions."""

    def whole(self, choices: Sequence[Choice]) -> JSONObject:
        self._given["return_weight_versions"] = True
        (told,) = super().whole(choices)["choices"]
        told["text"] = told.pop("message")["content"]
        return {"request_id": self._call.rid, "choices": [told], "usage": usage(choices), **self._prompt()}
