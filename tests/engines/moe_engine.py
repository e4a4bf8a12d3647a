"""A scripted engine that returns arrays per token as SGLang does. All are made up, but can be recomputed."""

from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from math import log
from typing import Annotated, Any
from zlib import crc32

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from forebay.core.errors import InvalidInput
from forebay.core.starts.asked_arrays import MAX_KEPT
from forebay.engines.fake_sglang.backend import Backend
from forebay.engines.fake_sglang.calls import Choice, JSONObject, PromptCall
from forebay.engines.fake_sglang.reply_bodies import ChatWriter, GenerateWriter, error_body
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody
from forebay.engines.fake_sglang.requests import DONE, CallsInFlight, chat_call, generate_calls
from forebay.engines.fake_sglang.routes import app_of, create_app
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.scripted.script import PARSERS
from forebay.engines.scripted.tokens import VOCABULARY_SIZE, logprob
from forebay.web.replies import encode

NUM_LAYERS, NUM_EXPERTS, NUM_ROUTED = 3, 16, 4
META_ONLY = ("return_sampling_mask", "return_flat_raw_output_top_logprobs")


def routes_of(tokens: Iterable[int], versions: Iterable[str]) -> list[list[int]]:
    """Routed experts of each token, layer by layer; ``versions`` names the weights that read each token.

    A row depends on its version, on the token and on all tokens before it.
    """
    rows, seen = [], 0
    for token, version in zip(tokens, versions, strict=False):
        seen = crc32(token.to_bytes(4, "little"), seen)
        digest = blake2b(f"{seen} {version}".encode(), digest_size=NUM_LAYERS).digest()
        # The step is odd, so the experts of a layer differ.
        rows.append([(byte + at * (byte >> 4 | 1)) % NUM_EXPERTS for byte in digest for at in range(NUM_ROUTED)])
    return rows


def kept_ids(token: int, top_k: int) -> list[int]:
    """Ids that were left to draw ``token`` from."""
    return list(range(token, token + top_k))


class ArrayFields(BaseModel):
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    return_sampling_mask: bool = False
    return_flat_raw_output_top_logprobs: bool = False

    def check(self, call: PromptCall) -> None:
        if self.return_sampling_mask and not (call.params.is_greedy or 1 < call.params.top_k <= MAX_KEPT):
            raise InvalidInput(f"return_sampling_mask requires 1 < top_k <= {MAX_KEPT}", field="top_k")
        start = self.routed_experts_start_len
        if self.return_routed_experts and start > len(call.prompt_ids):
            message = f"routed_experts_start_len={start} is higher than the number of input tokens"
            raise InvalidInput(message, field="routed_experts_start_len")

    def routes(self, choice: Choice, backend: Backend) -> JSONObject:
        """Rows ``[start, N - 1)`` of a choice that has ended; none if it was aborted before its prompt was read."""
        has_rows = choice.finish_reason is not None and choice.milestones.prefilled_s is not None
        if not (self.return_routed_experts and has_rows and backend.server_info().get("enable_return_routed_experts")):
            return {}
        prompt, versions = choice.call.prompt_ids, choice.versions or [backend.weight_version]
        # A sampled token is read when the next one is sampled. A retraction reads every token again.
        read_by = [versions[0]] * len(prompt) + versions[1:]
        if choice.num_retractions:
            read_by = versions[-1:] * len(read_by)
        rows = routes_of([*prompt, *choice.token_ids][:-1], read_by)[self.routed_experts_start_len :]
        return {"routed_experts": _b64("i", [expert for row in rows for expert in row])}

    def meta(self, choice: Choice, backend: Backend) -> JSONObject:
        found, num_top = self.routes(choice, backend), choice.call.num_top_logprobs
        if self.return_sampling_mask:
            top_k = 1 if choice.call.params.is_greedy else choice.call.params.top_k
            found["output_token_sampling_mask"] = [kept_ids(token, top_k) for token in choice.token_ids]
            found["output_token_sampling_logprobs"] = [-log(top_k)] * len(choice.tokens)
        if self.return_flat_raw_output_top_logprobs:
            before = pairwise([choice.call.prompt_ids[-1], *choice.token_ids])
            top = [_top(*pair, version, num_top) for pair, version in zip(before, choice.versions, strict=False)]
            found["output_top_logprobs_val_flat_b64"] = _b64("f", [value for row in top for value, _ in row])
            found["output_top_logprobs_idx_flat_b64"] = _b64("i", [token for row in top for _, token in row])
            found["output_top_logprobs_shape"] = [len(choice.tokens), num_top]
            found["output_top_logprobs_null_prefix"] = 0
        return found


class MoEChat(ChatBody, ArrayFields):
    @model_validator(mode="after")
    def _arrays_come_in_meta_info(self) -> "MoEChat":
        if any(getattr(self, name) for name in META_ONLY) and not self.return_meta_info:
            raise ValueError(f"{META_ONLY} require return_meta_info=true.")
        return self


class MoEGenerate(GenerateBody, ArrayFields):
    pass


class MoEChatWriter(ChatWriter):
    _body: MoEChat

    def _choice(self, choice: Choice) -> JSONObject:
        body = super()._choice(choice)
        if "meta_info" in body:
            body["meta_info"] |= self._body.meta(choice, self._backend)
        return body

    def _sglext(self, choices: Sequence[Choice]) -> JSONObject:
        # As in SGLang, of one choice only: in a stream, the one that began first.
        first = next(iter(self._num_sent), choices[0])
        routes = {} if self._body.return_meta_info else self._body.routes(first, self._backend)
        ext: JSONObject = super()._sglext(choices).get("sglext", {}) | routes
        return {"sglext": ext} if ext else {}


class MoEGenerateWriter(GenerateWriter):
    _body: MoEGenerate

    def _generated(self, choice: Choice) -> JSONObject:
        body = super()._generated(choice)
        body["meta_info"] |= self._body.meta(choice, self._backend)
        return body


class MoEEngine(ScriptedEngine):
    """Returns routed experts, unless ``started_with`` says otherwise, sampling masks and flat top logprobs."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.started_with["enable_return_routed_experts"] = True

    def _face(self) -> ASGIApp:
        self._in_flight = CallsInFlight(self._backend)
        calls = {"/v1/chat/completions": self._chat, "/generate": self._generate}
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in calls.items()]
        return app_of([*routes, *create_app(self._backend, parsers=PARSERS).routes])  # type: ignore[list-item]

    async def _chat(self, request: Request) -> Response:
        body = MoEChat.read(await request.body())
        call = await chat_call(self._backend, body, request.headers.get("traceparent"))
        try:
            body.check(call)
        except InvalidInput as error:
            if not body.stream:
                raise
            # SGLang's scheduler refuses it, so a stream has begun: the error is its first event.
            first = b"data: " + encode({"error": error_body(error.message, 400)}) + b"\n\n"
            return Response(first + DONE, media_type="text/event-stream")
        return await self._in_flight.answer(request, [call], MoEChatWriter(body, call, self._backend))

    async def _generate(self, request: Request) -> Response:
        body = MoEGenerate.read(await request.body())
        calls = await generate_calls(self._backend, body)
        for call in calls:
            body.check(call)
        return await self._in_flight.answer(request, calls, MoEGenerateWriter(body, calls, self._backend))


def _top(before: int, token: int, version: str, number: int) -> list[tuple[float, int]]:
    likely = [each % VOCABULARY_SIZE for each in range(token, token + number)]
    return sorted(((logprob(before, each, version), each) for each in likely), reverse=True)


def _b64(kind: Any, values: Sequence[float]) -> str:
    return b64encode(array(kind, values).tobytes()).decode()
