"""Translate Responses requests to chat requests: the history with its reasoning, the tools, the sampling.

Equal items always yield equal chat messages, so that the next prompt continues the tokens of the previous one. Clients
that store no state here get the reasoning as ``encrypted_content`` and return it; it is packed, not encrypted.
"""

import base64
import zlib
from collections.abc import Iterable, Sequence

from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import (
    STREAM_OPTIONS,
    Fields,
    ReplyMemo,
    arguments_object,
    assistant_message,
)
from forebay.gateway.dialects.responses.request import (
    LOGPROBS,
    AnyItem,
    CallOutput,
    ContentPart,
    CustomCall,
    FunctionCall,
    ImageContent,
    MessageItem,
    Reasoning,
    RefusalContent,
    ResponsesRequest,
    TextContent,
    TextFormat,
    parsed_items,
)
from forebay.gateway.dialects.responses.store import ResponseStore
from forebay.gateway.dialects.responses.tools import OfferedTools, chat_choice, custom_arguments, flat_name
from forebay.gateway.dialects.unknown import UnknownFieldLog, UnknownPart

PREFIX = "forebay-reasoning-v1."
MAX_BYTES = 16 * 1024 * 1024
"""Maximum decompressed size of packed reasoning: a few bytes of zlib can expand to gigabytes."""
DEVELOPER = "Developer instructions:\n"
"""Precedes a developer's text, because chat templates support only the role system."""


def to_chat(
    request: ResponsesRequest, engine_fields: Fields, store: ResponseStore, memo: ReplyMemo, unknown: UnknownFieldLog
) -> Fields:
    """Translate a Responses request to a chat request. Raises ``ProtocolRefused``.

    ``unknown`` gets the names of features that were left out or passed on unchecked.
    """
    items = store.history(request.previous_response_id) + store.resolved(request.input_items)
    messages = _chat_messages(parsed_items(items, unknown), request.instructions, memo, unknown)
    chat = {"model": request.model, "messages": messages, **_tool_fields(request, unknown)}
    chat |= _sampling(request, unknown)
    if request.stream:
        chat |= {"stream": True, "stream_options": STREAM_OPTIONS}
    return {**chat, **engine_fields}


def _sampling(request: ResponsesRequest, unknown: UnknownFieldLog) -> Fields:
    fields: Fields = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop,
        "user": request.user,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _response_format(request.text.format if request.text else None, unknown),
    }
    if request.includes(LOGPROBS):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or None}
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(wanted: TextFormat | None, unknown: UnknownFieldLog) -> Fields | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.type != "json_schema":
        unknown.left_out("text_format", wanted.type)
        return None
    if wanted.schema_ is None:
        raise ProtocolRefused("text.format.schema: Field required", param="text.format.schema")
    schema: Fields = {"name": wanted.name, "schema": wanted.schema_}
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"type": "json_schema", "json_schema": schema}


# --- messages


def _tool_fields(request: ResponsesRequest, unknown: UnknownFieldLog) -> Fields:
    """Return the chat's ``tools``, ``tool_choice`` and ``parallel_tool_calls``, as far as needed."""
    tools = OfferedTools(request.tools)
    for _ in range(tools.num_left_out):
        unknown.left_out("tool_of_the_same_name")
    choice = chat_choice(request.tool_choice or "auto", tools)
    if not tools.all:
        return {}
    parallel = request.parallel_tool_calls is not False  # on by default, also for null
    return {"tools": [tool.definition for tool in tools.all], "tool_choice": choice, "parallel_tool_calls": parallel}


def _chat_messages(
    items: Sequence[AnyItem], instructions: str | None, memo: ReplyMemo, unknown: UnknownFieldLog
) -> list[Fields]:
    """Return the chat messages of a conversation; replies known to ``memo`` get their original text."""
    system = [instructions] if instructions else []
    messages: list[Fields] = []
    for run in _runs(items):
        first = run[0]
        if _is_assistants(first):
            messages.append(memo.restored(_assistant(run, unknown)))
        elif isinstance(first, CallOutput):
            messages.append({"role": "tool", "tool_call_id": first.call_id, "content": _output(first, unknown)})
        elif isinstance(first, MessageItem) and first.role == "user":
            messages.append({"role": "user", "content": _content(first, unknown)})
        elif isinstance(first, MessageItem):
            system.append((DEVELOPER if first.role == "developer" else "") + _text(first, unknown))
    # One message at the start: most chat templates reject a second system message.
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def _runs(items: Iterable[AnyItem]) -> list[list[AnyItem]]:
    """Group the items of each answer of the model; other items stay single. Drops empty reasoning."""
    runs: list[list[AnyItem]] = []
    for item in items:
        # Reasoning packed elsewhere, for example by OpenAI, unpacks to nothing and would split a run.
        if isinstance(item, Reasoning) and not _thought(item):
            continue
        if runs and _is_assistants(item) and _is_assistants(runs[-1][0]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _is_assistants(item: AnyItem) -> bool:
    return isinstance(item, FunctionCall | CustomCall | Reasoning) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _assistant(run: Sequence[AnyItem], unknown: UnknownFieldLog) -> Fields:
    texts = [_text(item, unknown) for item in run if isinstance(item, MessageItem)]
    thoughts = [_thought(item) for item in run if isinstance(item, Reasoning)]
    calls = [_call(item) for item in run if isinstance(item, FunctionCall | CustomCall)]
    content = "\n\n".join(text for text in texts if text)
    return assistant_message({"content": content, "reasoning_content": "\n".join(thoughts), "tool_calls": calls})


def _call(item: FunctionCall | CustomCall) -> Fields:
    if isinstance(item, CustomCall):
        arguments = custom_arguments(item.input)
    else:
        # Engines reject a history whose arguments are not a JSON object, such as those of a truncated call.
        arguments = "{}" if arguments_object(item.arguments) is None else item.arguments
    name = flat_name(item.namespace, item.name)
    return {"id": item.call_id, "function": {"name": name, "arguments": arguments}}


def _thought(item: Reasoning) -> str:
    parts = item.summary or item.content or []
    return "\n".join(part.text for part in parts if part.text) or opened(item.encrypted_content)


def _output(item: CallOutput, unknown: UnknownFieldLog) -> str | list[Fields]:
    if isinstance(item.output, str):
        return item.output
    parts = [_part(part, unknown) for part in item.output]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _text(item: MessageItem, unknown: UnknownFieldLog) -> str:
    """Return all text of a message that a chat can contain."""
    if isinstance(item.content, str):
        return item.content
    said = []
    for part in item.content:
        if isinstance(part, TextContent | RefusalContent):
            said.append(_said(part))
        else:
            unknown.left_out("content", part.type)
    return "".join(said)


def _content(item: MessageItem, unknown: UnknownFieldLog) -> str | list[Fields]:
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part, unknown) for part in item.content]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: ContentPart, unknown: UnknownFieldLog) -> Fields:
    if isinstance(part, ImageContent):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail or "auto"}}
    if isinstance(part, UnknownPart):
        unknown.passed_on("content", part.type)
        return part.given
    assert isinstance(part, TextContent | RefusalContent)
    return {"type": "text", "text": _said(part)}


def _said(part: TextContent | RefusalContent) -> str:
    return part.text if isinstance(part, TextContent) else part.refusal


# --- reasoning


def packed(text: str) -> str:
    """Pack a text as ``encrypted_content``."""
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def opened(blob: str | None) -> str:
    """Unpack the text of an ``encrypted_content``; empty if it was not packed here."""
    if not blob or not blob.startswith(PREFIX):
        return ""
    try:
        # Not ``zlib.decompress``, which has no size limit.
        return zlib.decompressobj().decompress(base64.urlsafe_b64decode(blob.removeprefix(PREFIX)), MAX_BYTES).decode()
    except (ValueError, zlib.error):
        return ""
