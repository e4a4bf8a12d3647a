"""What the routes hold: the model, its generation thread, and what they tell about themselves."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Self

from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.generate import GenerationThread
from forebay.engines.tiny.model import LoadedModel
from forebay.engines.tiny.prompt import build_call, encode_prompt
from forebay.engines.tiny.reply import ReplyWriter, Told
from forebay.engines.tiny.wire import ChatBody, JSONObject

DEFAULT_NAME = "tiny"


class Service:
    """One model being served. Entered with ``async with`` on the loop that asks it."""

    def __init__(self, model: LoadedModel, *, name: str = DEFAULT_NAME, threads: int = 1, max_rows: int = 64) -> None:
        self.thread = GenerationThread(model, threads=threads, max_rows=max_rows)
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
        """The call for a body; ``InvalidInput`` where it cannot be served."""
        loop = asyncio.get_running_loop()
        prompt_ids = await loop.run_in_executor(self._encoder, encode_prompt, self._model.tokenizer, body)
        return build_call(self._model, body, prompt_ids, self.thread.max_rows)

    def reply_writer(self, call: Call, body: ChatBody) -> ReplyWriter:
        """What writes the reply to a call."""
        told = Told(logprobs=bool(body.logprobs), token_ids=body.return_token_ids)
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
