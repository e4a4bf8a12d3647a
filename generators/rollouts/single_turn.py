"""Request for one assistant message, which is continued if the engine aborts it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forebay.core.errors import EngineError
from forebay.core.task_row import Message
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.reply_shape import name_reasoning
from forebay.engines.capture.turn import ABORTED
from forebay.engines.continuation.continued_call import Join, Rest, ended_at_once
from forebay.engines.continuation.message import EngineReading, Whole
from forebay.engines.continuation.parts import Json, Part, ends_with_text
from forebay.engines.router_workers import WorkerAdmin, admin_client, root_url

if TYPE_CHECKING:  # the package takes half a second to import, and each inspected generator file would wait for it
    from openai import AsyncOpenAI, OpenAI
    from openai.types.chat import ChatCompletion

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
"""Arguments of ``chat.completions.create``. Other sampling parameters (``top_k``, ``min_p``, …) go into the body."""

Answer = tuple[list[Message], str]


async def single_turn(
    client: "AsyncOpenAI",
    messages: Sequence[Message],
    sampling_params: dict[str, Any],
    tools: Sequence[Any] | None = None,
) -> Answer:
    """Request one assistant message. Returns ``messages`` with it appended, and the finish reason.

    A reply that the engine aborted, for example for a weight update, is continued with the rest of ``max_tokens``. It
    continues from its token ids if the engine returns them, else from its text. A reply with a grammar
    (``response_format``, a required tool call) is requested again instead. A rollout's client does this for every call,
    and keeps the segments' texts and weight versions in the sample's ``extra_info["segments"]``. If ``messages`` ends
    with an assistant message, that message is continued.
    """
    body = _body(client, messages, sampling_params, tools)
    reply = await client.chat.completions.create(**_arguments(body))
    if _finish_reason(reply) != ABORTED:
        return _answer(messages, reply.choices[0].message.model_dump(warnings=False), _finish_reason(reply))

    async def ask(body: Json) -> Part:
        return _part(body, await client.chat.completions.create(**_arguments(body)))

    turn = await Rest(body, _part(body, reply).only).finish(ask, lambda join: _joined(client, join))
    return _answer(messages, turn.reply, turn.finish_reason)


def query_single_turn(
    client: "OpenAI", messages: Sequence[Message], sampling_params: dict[str, Any], tools: Sequence[Any] | None = None
) -> Answer:
    """Request one assistant message, like ``single_turn``, from a rollout function that is not ``async``."""
    body = _body(client, messages, sampling_params, tools)
    reply = client.chat.completions.create(**_arguments(body))
    if _finish_reason(reply) != ABORTED:
        return _answer(messages, reply.choices[0].message.model_dump(warnings=False), _finish_reason(reply))

    async def ask(body: Json) -> Part:
        return _part(body, client.chat.completions.create(**_arguments(body)))

    async def join(parts: Join) -> Whole | None:
        return asyncio.run(_joined(client, parts))

    async def pause(seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - in a thread

    turn = ended_at_once(Rest(body, _part(body, reply).only).finish(ask, join, pause))
    return _answer(messages, turn.reply, turn.finish_reason)


def _body(client: object, messages: Sequence[Message], params: Mapping[str, Any], tools: Sequence[Any] | None) -> Json:
    """Return the request body. A final assistant message is marked to be continued."""
    rollout = getattr(client, "rollout", None)
    body = {**(params.get("extra_body") or {}), **params, "messages": list(messages)}
    body = {"model": getattr(rollout, "model", "default"), **body}
    for name in ("extra_body", "stream"):
        body.pop(name, None)
    if tools:
        body["tools"] = list(tools)
    if ends_with_text(messages):
        # vLLM requires the last field, SGLang ignores it.
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _arguments(body: Json) -> dict[str, Any]:
    """Convert a body to arguments of ``create``."""
    extra = {name: value for name, value in body.items() if name not in OPENAI_NAMES}
    known = {name: value for name, value in body.items() if name in OPENAI_NAMES}
    return {**known, "extra_body": extra} if extra else known


def _part(body: Json, reply: "ChatCompletion") -> Part:
    fields = reply.model_dump(exclude_unset=True, warnings=False)
    return Part(fields, turns_of_chat(body, fields))


def _finish_reason(reply: "ChatCompletion") -> str:
    if not reply.choices:
        raise EngineError("the engine answered without a choice", status_code=200)
    reason: Any = reply.choices[0].finish_reason  # the package's types promise a reason; some servers send null
    return str(reason or "stop")


def _answer(messages: Sequence[Message], reply: dict[str, Any], finish_reason: str) -> Answer:
    """Return the messages with the reply appended, or with their last one continued by it."""
    name_reasoning(reply)
    kept = {name: reply[name] for name in ("tool_calls", "reasoning_content") if reply.get(name)}
    # Content is never null, because slime's readers take its length.
    content = reply.get("content") or ""
    if ends_with_text(messages):
        messages, content = messages[:-1], messages[-1]["content"] + content
    return [*messages, {"role": "assistant", "content": content, **kept}], finish_reason


async def _joined(client: "AsyncOpenAI | OpenAI", join: Join) -> Whole | None:
    """Return the message of a turn in several parts."""
    async with admin_client(client.api_key) as http:
        return await EngineReading(WorkerAdmin(http, root_url(str(client.base_url))), join.turn, join.body).message()
