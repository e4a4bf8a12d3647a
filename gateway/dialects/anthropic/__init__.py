"""Anthropic's Messages API over chat completions: pure functions between the bodies of the two."""

from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.anthropic.errors import MessagesRefused, error, error_body
from forebay.gateway.dialects.anthropic.from_chat import blocks, edits_field, message, stop_fields, usage_fields
from forebay.gateway.dialects.anthropic.request import MessagesRequest, Prompt, parsed, parsed_prompt
from forebay.gateway.dialects.anthropic.stream import EventStream
from forebay.gateway.dialects.anthropic.to_chat import chat_messages
from forebay.gateway.dialects.anthropic.tools import tool_fields
from forebay.gateway.dialects.history import STREAM_OPTIONS, Fields, ReplyMemo, assistant_message

__all__ = [
    "EventStream",
    "MessagesRefused",
    "ReplyMemo",
    "error",
    "error_body",
    "from_chat",
    "from_tokenize",
    "to_chat",
    "to_tokenize",
]


def to_chat(body: Mapping[str, Any], memo: ReplyMemo | None = None) -> Fields:
    """The chat request for a Messages request. Raises ``MessagesRefused``, whose body is the reply."""
    request, engine_fields = parsed(body)
    chat = {**_prompt(request, memo), "max_tokens": request.max_tokens, **_sampling(request)}
    if request.stream:
        chat |= {"stream": True, "stream_options": STREAM_OPTIONS}
    return _with_engine_fields(chat, engine_fields)


def from_chat(reply: Mapping[str, Any], body: Mapping[str, Any], memo: ReplyMemo | None = None) -> Fields:
    """The message for a chat reply to the request ``body``. Raises ``MessagesRefused`` for a broken off answer."""
    choice = reply["choices"][0]
    stop = stop_fields(choice["finish_reason"] or "", choice.get("matched_stop"), body.get("stop_sequences"))
    answer = assistant_message(choice["message"])
    if memo:
        memo.remember(answer)
    told = message(reply["model"], blocks(answer), stop, usage_fields(reply.get("usage") or {}))
    return {**told, **edits_field(body)}


def to_tokenize(body: Mapping[str, Any], memo: ReplyMemo | None = None) -> Fields:
    """The body for SGLang's ``/tokenize`` that counts the tokens of a Messages prompt. Raises ``MessagesRefused``."""
    prompt, engine_fields = parsed_prompt(body)
    return _with_engine_fields(_prompt(prompt, memo), engine_fields)


def from_tokenize(reply: Mapping[str, Any]) -> Fields:
    """The reply of ``/v1/messages/count_tokens``."""
    return {"input_tokens": reply["count"]}


def _prompt(prompt: Prompt, memo: ReplyMemo | None) -> Fields:
    messages = chat_messages(prompt, memo)
    chat = {"model": prompt.model, "messages": messages, **tool_fields(prompt), **_reasoning(prompt)}
    # Else SGLang would give the model its own words as the user's.
    return {**chat, "continue_final_message": True} if messages and messages[-1]["role"] == "assistant" else chat


def _reasoning(prompt: Prompt) -> Fields:
    """Both words for the switch: templates know either the one or the other."""
    fields: Fields = {}
    if prompt.thinking:
        thinks = prompt.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"thinking": thinks, "enable_thinking": thinks}
    effort = prompt.output_config.effort if prompt.output_config else None
    return {**fields, "reasoning_effort": "max" if effort == "xhigh" else effort} if effort else fields


def _sampling(request: MessagesRequest) -> Fields:
    fields: Fields = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }
    if request.output_config and request.output_config.format:
        schema = {"name": "response", "schema": request.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in fields.items() if value is not None}


def _with_engine_fields(chat: Fields, engine_fields: Fields) -> Fields:
    template = {**chat.get("chat_template_kwargs", {}), **engine_fields.get("chat_template_kwargs", {})}
    return {**chat, **engine_fields, **({"chat_template_kwargs": template} if template else {})}
