"""One assistant message from an engine, gone on with when the engine aborts it."""

import asyncio
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.core.errors import EngineError
from forebay.generators.link import Backoff
from forebay.generators.rows import Message

if TYPE_CHECKING:  # the package takes half a second to import, and each inspected generator file would wait for it
    from openai import AsyncOpenAI, OpenAI
    from openai.types.chat import ChatCompletion

BUDGET_NAMES = ("max_completion_tokens", "max_tokens")
MAX_EMPTY_SEGMENTS = 10
"""So many times in a row may an engine abort a call before its first token: with the pauses, half a minute."""

OPENAI_NAMES = frozenset(
    {
        "extra_headers",
        "extra_query",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "temperature",
        "timeout",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
    }
)
"""What ``chat.completions.create`` takes; any other sampling parameter (``top_k``, ``min_p``, …) goes into the body."""

Request = dict[str, Any]
Pause = float
Step = Request | Pause
Reply: TypeAlias = "ChatCompletion | None"
Turn = Generator[Step, Reply, tuple[list[Message], str]]


async def single_turn(
    client: "AsyncOpenAI",
    messages: Sequence[Message],
    sampling_params: dict[str, Any],
    tools: Sequence[Any] | None = None,
) -> tuple[list[Message], str]:
    """Ask for one assistant message: ``messages`` with it at the end, and the finish reason.

    A reply that the engine aborted (a weight update, say) is continued from its text with the tokens that are left of
    ``max_tokens``; the texts of the segments are kept in the sample's ``extra_info["segments"]``. If ``messages`` ends
    with an assistant message, that one is continued.
    """
    turn = _turn(client, messages, sampling_params, tools)
    reply: Reply = None
    while True:
        try:
            step = turn.send(reply)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        if isinstance(step, float):
            await asyncio.sleep(step)
            reply = None
        else:
            reply = await client.chat.completions.create(**step)


def query_single_turn(
    client: "OpenAI", messages: Sequence[Message], sampling_params: dict[str, Any], tools: Sequence[Any] | None = None
) -> tuple[list[Message], str]:
    """``single_turn`` for rollout functions that are not ``async``."""
    turn = _turn(client, messages, sampling_params, tools)
    reply: Reply = None
    while True:
        try:
            step = turn.send(reply)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        if isinstance(step, float):
            time.sleep(step)
            reply = None
        else:
            reply = client.chat.completions.create(**step)


@dataclass
class _Segments:
    """The parts of one assistant message, each from one call."""

    prefix: str
    texts: list[str] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    weight_versions: list[str | None] = field(default_factory=list)

    def add(self, reply: "ChatCompletion") -> None:
        self.texts.append(reply.choices[0].message.content or "")
        self.completion_tokens.append(reply.usage.completion_tokens if reply.usage else 0)
        metadata = getattr(reply, "metadata", None) or {}
        self.weight_versions.append(metadata.get("weight_version") if isinstance(metadata, dict) else None)

    @property
    def text(self) -> str:
        return self.prefix + "".join(self.texts)

    @property
    def is_last_empty(self) -> bool:
        return not self.texts[-1] and not self.completion_tokens[-1]


def _turn(
    client: object, messages: Sequence[Message], sampling_params: dict[str, Any], tools: Sequence[Any] | None
) -> Turn:
    """The turn without its I/O: yields requests, or pauses in seconds, is sent replies, returns what they brought."""
    before, prefix = _split_prefix(messages)
    segments = _Segments(prefix)
    budget = _Budget(sampling_params)
    pause, num_empty = Backoff(0.25, 5.0), 0
    while True:
        request = _request(client, before, segments.text, budget.params(), tools)
        reply = yield request
        if reply is None or not reply.choices:
            raise EngineError("the engine answered without a choice", status_code=200)
        segments.add(reply)
        told: Any = reply.choices[0].finish_reason
        # The package's types promise a reason; some servers send null.
        finish_reason = str(told or "stop")
        budget.spend(segments.completion_tokens[-1])
        if finish_reason == "abort" and budget.is_spent:
            finish_reason = "length"
        if finish_reason != "abort":
            _note_segments(client, len(before), segments)
            return [*before, _message(reply, segments.text)], finish_reason
        num_empty = num_empty + 1 if segments.is_last_empty else 0
        if num_empty >= MAX_EMPTY_SEGMENTS:
            raise EngineError("the engine aborts every call before its first token", status_code=200)
        if num_empty:
            yield pause.next_s()


class _Budget:
    """The tokens that may still be generated, under whichever name the sampling parameters limit them."""

    def __init__(self, sampling_params: dict[str, Any]) -> None:
        self._params = dict(sampling_params)
        self._name = next((name for name in BUDGET_NAMES if self._params.get(name) is not None), None)
        self._left = int(self._params[self._name]) if self._name else 0

    def spend(self, tokens: int) -> None:
        self._left -= tokens

    @property
    def is_spent(self) -> bool:
        return self._name is not None and self._left <= 0

    def params(self) -> dict[str, Any]:
        return {**self._params, self._name: self._left} if self._name else self._params


def _split_prefix(messages: Sequence[Message]) -> tuple[list[Message], str]:
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls"):
        return list(messages[:-1]), last["content"]
    return list(messages), ""


def _request(
    client: object, before: list[Message], text: str, params: dict[str, Any], tools: Sequence[Any] | None
) -> Request:
    served = getattr(getattr(client, "rollout", None), "model", "default")
    request: Request = {"model": served, **params, "messages": before}
    if tools:
        request["tools"] = list(tools)
    request.pop("stream", None)
    extra = dict(request.pop("extra_body", None) or {})
    if text:
        request["messages"] = [*before, {"role": "assistant", "content": text}]
        # vLLM insists on the second field, SGLang does not look at it.
        extra |= {"continue_final_message": True, "add_generation_prompt": False}
    for name in [name for name in request if name not in OPENAI_NAMES]:
        extra[name] = request.pop(name)
    return {**request, "extra_body": extra} if extra else request


def _message(reply: "ChatCompletion", text: str) -> Message:
    told = reply.choices[0].message.model_dump(exclude_none=True, warnings=False)
    kept = {name: told[name] for name in ("tool_calls", "reasoning_content") if told.get(name)}
    # Content is never null: slime's readers take its length.
    return {"role": "assistant", "content": text, **kept}


def _note_segments(client: object, message_index: int, segments: _Segments) -> None:
    """Keep where the text of one message was cut: its parts may stem from different weights."""
    rollout = getattr(client, "rollout", None)
    if rollout is None or len(segments.texts) < 2:
        return
    rollout.extra_info.setdefault("segments", []).append(
        {
            "message_index": message_index,
            "texts": segments.texts,
            "completion_tokens": segments.completion_tokens,
            "weight_versions": segments.weight_versions,
        }
    )
