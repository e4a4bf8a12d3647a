"""Back end of the embedded engine: its generation thread, its tokenizer, and the information it reports."""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.calls import JSONObject
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody, WeightsBody
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.generation_thread import GenerationThread
from forebay.engines.tiny.model import LoadedModel
from forebay.web.request_models import invalid

DEFAULT_NAME = "tiny"

UNSUPPORTED: dict[str, Collection[object]] = {
    "functions": (None, []),
    "return_sampling_mask": (None, False),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
}
"""Fields that would change the answer and are not supported, with the values that have no effect."""

UNSUPPORTED_PARAMS = UNSUPPORTED | {"skip_special_tokens": (True,), "spaces_between_special_tokens": (True,)}
"""Unsupported sampling parameters of ``/generate``, with the values that have no effect."""

T = TypeVar("T")


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message; other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def rendered(self) -> JSONObject:
        """Return the message in the chat template's format, with its content as one string."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message = {**self.model_dump(exclude_none=True), "content": text}
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        return message


class ChatMessages(BaseModel):
    """The messages of a chat."""

    messages: list[Message]


class TinyEngine:
    """Back end for one served model. Enter it with ``async with`` on the loop that serves."""

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
        """Whether the engine answers calls."""
        return self.thread.is_alive

    @property
    def weight_version(self) -> str:
        """Trainer's name for the current weights."""
        return self.thread.weights.version

    def refuse_unserved(self, body: ChatBody | GenerateBody) -> None:
        """Raise ``InvalidInput`` for a feature that SGLang supports and this engine does not."""
        if isinstance(body, ChatBody):
            _refuse(body.given, UNSUPPORTED)
            if body.continue_final_message and body.messages[-1].get("role") != "assistant":
                message = "continue_final_message needs an assistant message at the end"
                raise InvalidInput(message, field="continue_final_message")
            return
        for at in range(len(body.prompts)):
            extra = body.params_of(at).model_extra or {}
            _refuse(extra, UNSUPPORTED_PARAMS)
            # SGLang rejects unknown parameters; of the known ones, only a few are supported here.
            for name in extra.keys() - UNSUPPORTED_PARAMS.keys():
                raise InvalidInput(f"sampling_params.{name} is not supported by the embedded engine", field=name)
        if body.stream and len(body.prompts) > 1:
            raise InvalidInput("the embedded engine streams one prompt at a time", field="stream")

    async def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""
        return await self._encoded(lambda: list(self._model.tokenizer.encode(text)))

    async def encode_chat(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
    ) -> Sequence[int]:
        """Return the tokens of a chat's prompt. Raises ``InvalidInput`` if the template rejects the messages."""
        return await self._encoded(
            lambda: _chat_tokens(self._model.tokenizer, messages, tools, is_continued=is_continued)
        )

    async def decode(self, tokens: Sequence[int], *, with_marks: bool) -> str:
        """Return the text of tokens."""
        return await self._encoded(lambda: self._text(tokens, skips_marks=not with_marks))

    def token_text(self, token: int) -> str:
        """Return the text of one token, including special tokens."""
        return self._text([token], skips_marks=False)

    async def update_weights(self, body: WeightsBody) -> None:
        """Load the weights in the folder of ``body`` between two steps, even with calls in flight.

        SGLang 0.5.23 does so only while paused, and otherwise waits until no call is in flight.
        """
        path, version = Path(body.model_path), body.weight_version
        await self.thread.update_weights(path, version, flushes_cache=body.flush_cache)

    def model_info(self) -> JSONObject:
        """Return the model's fields of ``/model_info``, with the names of SGLang 0.5.23."""
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
        """Return no further fields."""
        return {}

    def load(self) -> JSONObject:
        """Return the load of the thread, with the names of SGLang 0.5.23."""
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
            "cache_hit_rate": load.num_reused / max(1, load.num_reused + load.num_prefilled),
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


def _chat_tokens(
    tokenizer: Any, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
) -> list[int]:
    """Render and encode a chat's prompt. A continued message is its open end, as in SGLang."""
    try:
        rendered = [message.rendered() for message in ChatMessages.model_validate({"messages": messages}).messages]
    except ValidationError as error:
        raise invalid(error) from None
    partial = rendered.pop()["content"] if is_continued else ""
    try:
        prompt = tokenizer.apply_chat_template(
            rendered, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    except (require("jinja2").TemplateError, TypeError, RecursionError) as error:
        raise InvalidInput(f"the model's chat template rejects these messages: {error}", field="messages") from error
    return list(tokenizer.encode(prompt + partial, add_special_tokens=False))


def _refuse(given: Mapping[str, Any], unsupported: Mapping[str, Collection[object]]) -> None:
    for name, idle in unsupported.items():
        if name in given and given[name] not in idle:
            raise InvalidInput(f"{name} is not supported by the embedded engine", field=name)


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments decoded, as chat templates expect them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
