"""What the routes hold: the model, its generation thread, and what they tell about themselves."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Self, TypeVar

from fastapi import Request

from forebay.core.errors import InvalidInput
from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.generation_thread import GenerationThread
from forebay.engines.tiny.model import LoadedModel
from forebay.engines.tiny.prompt import (
    build_call,
    build_calls,
    check_tokens,
    encode_chat,
    encode_prompt,
    encode_prompts,
)
from forebay.engines.tiny.reply_bodies import Choice, ReplyWriter, Told, generated
from forebay.engines.tiny.request_bodies import ChatBody, DetokenizeBody, GenerateBody, JSONObject, TokenizeBody

DEFAULT_NAME = "tiny"

T = TypeVar("T")
BodyT = TypeVar("BodyT")


class Service:
    """One model being served. Entered with ``async with`` on the loop that asks it."""

    def __init__(self, model: LoadedModel, *, name: str = DEFAULT_NAME, threads: int = 1, max_rows: int = 64) -> None:
        self.thread = GenerationThread(model, threads=threads, max_rows=max_rows)
        self._calls: dict[str, Call] = {}
        """Those that are prepared or in flight, by ``rid``."""
        self._model = model
        self._name = name
        self._started = datetime.now(UTC)
        # One thread, so that a long prompt blocks neither the loop nor the generation.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tiny-encoder")

    async def __aenter__(self) -> Self:
        self.thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.thread.stop()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, body: ChatBody) -> Call:
        """The call for a body, which has its ``rid`` until ``release``; ``InvalidInput`` where it cannot be served."""
        prompt_ids = await self._encoded(encode_prompt, body)
        call = build_call(self._model, body, prompt_ids, self.thread.max_rows)
        self._reserve([call])
        return call

    async def prepare_generate(self, body: GenerateBody) -> list[Call]:
        """The calls for ``/generate``, one for each prompt; ``InvalidInput`` as above."""
        prompts = await self._encoded(encode_prompts, body)
        calls = build_calls(self._model, body, prompts, self.thread.max_rows)
        self._reserve(calls)
        return calls

    def _reserve(self, calls: Sequence[Call]) -> None:
        new = {call.rid: call for call in calls}
        for call in calls:
            if call.rid in self._calls or new[call.rid] is not call:
                raise InvalidInput(f"Duplicate request ID detected: {call.rid}", field="rid")
        self._calls |= new

    def release(self, calls: Sequence[Call]) -> None:
        """Their ids are free for others. May be told twice."""
        for call in calls:
            if self._calls.get(call.rid) is call:
                del self._calls[call.rid]

    async def tokenize(self, body: TokenizeBody) -> JSONObject:
        """The body of ``POST /tokenize``."""
        tokens = await self._encoded(_tokenize, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._model.context_length}

    async def detokenize(self, body: DetokenizeBody) -> JSONObject:
        """The body of ``POST /detokenize``."""
        for tokens in body.tokens:
            check_tokens(self._model, tokens if isinstance(tokens, list) else [tokens], "tokens")
        return {"text": await self._encoded(_detokenize, body)}

    async def _encoded(self, encode: Callable[[Any, BodyT], T], body: BodyT) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoder, encode, self._model.tokenizer, body)

    def told(self, call: Call, choice: Choice, body: GenerateBody) -> JSONObject:
        """One reply of ``/generate``."""
        tokenizer = self._model.tokenizer if body.return_text_in_logprobs else None
        version = self.thread.weights.version
        return generated(call, choice, version, tokenizer=tokenizer, with_logprobs=body.return_logprob)

    def reply_writer(self, call: Call, body: ChatBody) -> ReplyWriter:
        """What writes the reply to a call."""
        told = Told(
            logprobs=bool(body.logprobs),
            token_ids=body.return_token_ids,
            meta_info=body.return_meta_info,
            input_ids_in_sglext=body.return_input_ids_in_sglext,
            output_ids_in_sglext=body.return_output_ids_in_sglext,
        )
        return ReplyWriter(call, body.model or self._name, self._model.tokenizer, told)

    def models(self) -> JSONObject:
        """The body of ``GET /v1/models``."""
        card = {
            "id": self._name,
            "object": "model",
            "created": int(self._started.timestamp()),
            "owned_by": "forebay",
            "root": self._name,
            "max_model_len": self._model.context_length,
        }
        return {"object": "list", "data": [card]}

    def model_info(self) -> JSONObject:
        """The body of ``GET /model_info``, with the names of SGLang 0.5.23."""
        config = self._model.network.config
        return {
            "model_path": str(self.thread.weights.path),
            "served_model_name": self._name,
            "tokenizer_path": str(self._model.path),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.thread.weights.version,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    def loads(self) -> JSONObject:
        """The body of ``GET /v1/loads``, with the names of SGLang 0.5.23; each choice counts as a request."""
        now = datetime.now(UTC)
        return {
            "timestamp": now.isoformat(),
            "version": version("forebay"),
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [self._load(now)],
        }

    def _load(self, now: datetime) -> JSONObject:
        load = self.thread.load
        return {
            "timestamp": now.timestamp(),
            "dp_rank": 0,
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": load.num_tokens,
            "num_total_tokens": load.num_tokens,
            "num_active_tokens": load.num_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": load.max_tokens,
            "max_running_requests": load.max_rows,
            "token_usage": load.num_tokens / load.max_tokens,
            "gen_throughput": load.tokens_per_s,
            "cache_hit_rate": load.cache_hit_rate,
            "utilization": load.num_running / load.max_rows,
            "total_prefill_uncached_tokens": load.num_prefilled,
            "total_prefill_busy_us": int(load.prefill_s * 1e6),
            "decode_moments": None,
        }


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service


def _tokenize(tokenizer: Any, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return list(encode_chat(tokenizer, body.messages, body.tools or []))
    return list(tokenizer.encode(body.prompt))


def _detokenize(tokenizer: Any, body: DetokenizeBody) -> str | list[str]:
    def text(tokens: list[int]) -> str:
        skips = body.skip_special_tokens
        return str(tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    flat = [token for token in body.tokens if isinstance(token, int)]
    return text(flat) if len(flat) == len(body.tokens) else [text(t) for t in body.tokens if isinstance(t, list)]
