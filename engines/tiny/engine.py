"""The embedded engine as the face asks it: its generation thread, its tokenizer, and what it says of itself."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeVar

from forebay.engines.fake_sglang.calls import JSONObject
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody, WeightsBody
from forebay.engines.tiny.generation_thread import GenerationThread
from forebay.engines.tiny.model import LoadedModel
from forebay.engines.tiny.prompt import chat_tokens, refuse_unserved

DEFAULT_NAME = "tiny"

T = TypeVar("T")


class TinyEngine:
    """One model being served: the face's back end. Entered with ``async with`` on the loop that serves."""

    def __init__(self, model: LoadedModel, *, name: str = DEFAULT_NAME, threads: int = 1, max_rows: int = 64) -> None:
        self.name = name
        self.context_length = model.context_length
        self.vocabulary_size = model.vocabulary_size
        self.max_choices = max_rows
        self.tells_textless_logprobs = self.has_metrics = True
        self.thread = thread = GenerationThread(model, threads=threads, max_rows=max_rows)
        self.submit, self.cancel, self.abort = thread.submit, thread.cancel, thread.abort
        self.pause, self.resume, self.name_weights = thread.pause, thread.resume, thread.name_weights
        self.flush_cache = thread.forget_prompts
        self._model = model
        # One thread, so that a long prompt blocks neither the loop nor the generation.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tiny-encoder")

    async def __aenter__(self) -> Self:
        self.thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.thread.stop()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    @property
    def is_alive(self) -> bool:
        """Whether calls are being answered."""
        return self.thread.is_alive

    @property
    def weight_version(self) -> str:
        """What the trainer calls the weights of now."""
        return self.thread.weights.version

    def refuse_unserved(self, body: ChatBody | GenerateBody) -> None:
        """Raise ``InvalidInput`` where something is asked that this engine does not serve."""
        refuse_unserved(body)

    async def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""
        return await self._encoded(lambda: list(self._model.tokenizer.encode(text)))

    async def encode_chat(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
    ) -> Sequence[int]:
        """The tokens of a chat's prompt; ``InvalidInput`` where the template does not take its messages."""
        return await self._encoded(
            lambda: chat_tokens(self._model.tokenizer, messages, tools, is_continued=is_continued)
        )

    async def decode(self, tokens: Sequence[int], *, with_marks: bool) -> str:
        """The text of tokens."""
        return await self._encoded(lambda: self._text(tokens, skips_marks=not with_marks))

    def token_text(self, token: int) -> str:
        """The text of one token, marks of the template included."""
        return self._text([token], skips_marks=False)

    async def update_weights(self, body: WeightsBody) -> None:
        """Take the weights in the folder of ``body`` between two steps, whatever is in flight.

        SGLang 0.5.23 does this only while it is paused, and else waits until nothing is in flight.
        """
        path, version = Path(body.model_path), body.weight_version
        await self.thread.update_weights(path, version, flushes_cache=body.flush_cache)

    def model_info(self) -> JSONObject:
        """What ``/model_info`` tells of the model, with the names of SGLang 0.5.23."""
        config = self._model.network.config
        return {
            "model_path": str(self.thread.weights.path),
            "tokenizer_path": str(self._model.path),
            "preferred_sampling_params": None,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    def server_info(self) -> JSONObject:
        """Nothing beside that."""
        return {}

    def load(self) -> JSONObject:
        """How busy the thread is, with the names of SGLang 0.5.23."""
        load = self.thread.load
        return {
            "timestamp": datetime.now(UTC).timestamp(),
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

    async def _encoded(self, encode: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)

    def _text(self, tokens: Sequence[int], *, skips_marks: bool) -> str:
        tokenizer = self._model.tokenizer
        return str(tokenizer.decode(tokens, skip_special_tokens=skips_marks, clean_up_tokenization_spaces=False))
