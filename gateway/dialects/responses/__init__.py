"""OpenAI's Responses API over chat completions: pure functions between the bodies of the two."""

import time
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.history import STREAM_OPTIONS, Fields, ReplyMemo, assistant_message
from forebay.gateway.dialects.responses.errors import ResponsesRefused, error, error_body
from forebay.gateway.dialects.responses.from_chat import ended, new_id, output_items, response, status_of
from forebay.gateway.dialects.responses.request import LOGPROBS, ResponsesRequest, TextFormat, parsed, parsed_items
from forebay.gateway.dialects.responses.store import ResponseStore
from forebay.gateway.dialects.responses.stream import EventStream
from forebay.gateway.dialects.responses.to_chat import chat_messages, tool_fields

__all__ = [
    "EventStream",
    "ReplyMemo",
    "ResponseStore",
    "ResponsesRefused",
    "error",
    "error_body",
    "from_chat",
    "to_chat",
]


def to_chat(body: Mapping[str, Any], store: ResponseStore | None = None, memo: ReplyMemo | None = None) -> Fields:
    """The chat request for a Responses request. Raises ``ResponsesRefused``, whose body is the reply."""
    request, engine_fields = parsed(body)
    store = store or ResponseStore()
    items = store.history(request.previous_response_id) + store.resolved(request.input_items)
    messages = chat_messages(parsed_items(items), request.instructions, memo)
    chat = {"model": request.model, "messages": messages, **tool_fields(request), **_sampling(request)}
    if request.stream:
        chat |= {"stream": True, "stream_options": STREAM_OPTIONS}
    return {**chat, **engine_fields}


def from_chat(
    reply: Mapping[str, Any],
    body: Mapping[str, Any],
    store: ResponseStore | None = None,
    memo: ReplyMemo | None = None,
) -> Fields:
    """The response for a chat reply to the request ``body``, kept in ``store`` unless the request forbids that."""
    request, _ = parsed(body)
    choice = reply["choices"][0]
    answer = assistant_message(choice["message"])
    if memo:
        memo.remember(answer)
    status = status_of(choice["finish_reason"])
    last = "completed" if status == "completed" else "incomplete"
    told = response(
        request,
        new_id("resp"),
        model=reply["model"],
        output=output_items(answer, request, last, choice.get("logprobs") if request.includes(LOGPROBS) else None),
        created_at=reply.get("created") or int(time.time()),
        status=status,
    )
    told = ended(told, choice["finish_reason"], reply.get("usage") or {})
    if store and request.store is not False:
        store.add(told, request.input_items)
    return told


def _sampling(request: ResponsesRequest) -> Fields:
    fields: Fields = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop,
        "user": request.user,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _response_format(request.text.format if request.text else None),
    }
    if request.includes(LOGPROBS):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or None}
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(wanted: TextFormat | None) -> Fields | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema_ is None:
        raise ResponsesRefused("text.format.schema: Field required", param="text.format.schema")
    schema: Fields = {"name": wanted.name, "schema": wanted.schema_}
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"type": "json_schema", "json_schema": schema}
