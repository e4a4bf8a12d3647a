"""Responses requests as chat requests: the history with its reasoning, the tools, the sampling.

The same items always give the same chat messages: the next prompt goes on from the last one's tokens. A custom tool
becomes a function that takes one text. Clients that keep no state here are given the reasoning in
``encrypted_content``, and hand it back; it is packed, not secret.
"""

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from forebay.gateway.dialects.errors import ResponsesRefused
from forebay.gateway.dialects.history import (
    STREAM_OPTIONS,
    Fields,
    ReplyMemo,
    arguments_object,
    arguments_text,
    assistant_message,
)
from forebay.gateway.dialects.responses.request import (
    LOGPROBS,
    AnyItem,
    CallOutput,
    ContentPart,
    CustomCall,
    CustomTool,
    FunctionCall,
    FunctionTool,
    ImageContent,
    MessageItem,
    Reasoning,
    RefusalContent,
    ResponsesRequest,
    TextContent,
    TextFormat,
    parsed,
    parsed_items,
)
from forebay.gateway.dialects.responses.store import ResponseStore

PREFIX = "forebay-reasoning-v1."
MAX_BYTES = 16 * 1024 * 1024
"""The most that packed reasoning opens to: a few bytes of zlib can stand for gigabytes."""
DEVELOPER = "Developer instructions:\n"
"""Before the text of a developer: chat templates know the role system only."""
INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def to_chat(body: Mapping[str, Any], store: ResponseStore | None = None, memo: ReplyMemo | None = None) -> Fields:
    """The chat request for a Responses request. Raises ``ResponsesRefused``, whose body is the reply."""
    request, engine_fields = parsed(body)
    store = store or ResponseStore()
    items = store.history(request.previous_response_id) + store.resolved(request.input_items)
    messages = _chat_messages(parsed_items(items), request.instructions, memo)
    chat = {"model": request.model, "messages": messages, **_tool_fields(request), **_sampling(request)}
    if request.stream:
        chat |= {"stream": True, "stream_options": STREAM_OPTIONS}
    return {**chat, **engine_fields}


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


# --- messages


def _chat_messages(items: Sequence[AnyItem], instructions: str | None, memo: ReplyMemo | None) -> list[Fields]:
    """The chat messages of a conversation, with the replies that ``memo`` knows as the engine wrote them."""
    system = [instructions] if instructions else []
    messages: list[Fields] = []
    for run in _runs(items):
        first = run[0]
        if _is_assistants(first):
            reply = _assistant(run)
            messages.append(memo.restored(reply) if memo else reply)
        elif isinstance(first, CallOutput):
            messages.append({"role": "tool", "tool_call_id": first.call_id, "content": _output(first)})
        elif isinstance(first, MessageItem) and first.role == "user":
            messages.append({"role": "user", "content": _content(first)})
        elif isinstance(first, MessageItem):
            system.append((DEVELOPER if first.role == "developer" else "") + _text(first))
    # One message at the head: most chat templates refuse a second system message.
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def _runs(items: Iterable[AnyItem]) -> list[list[AnyItem]]:
    """The items of one answer of the model together, each other item alone. Empty reasoning is left out."""
    runs: list[list[AnyItem]] = []
    for item in items:
        # Reasoning that was not packed here, by OpenAI itself say, opens to nothing: it would cut a run in two.
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


def _assistant(run: Sequence[AnyItem]) -> Fields:
    texts = [_text(item) for item in run if isinstance(item, MessageItem)]
    thoughts = [_thought(item) for item in run if isinstance(item, Reasoning)]
    calls = [_call(item) for item in run if isinstance(item, FunctionCall | CustomCall)]
    content = "\n\n".join(text for text in texts if text)
    return assistant_message({"content": content, "reasoning_content": "\n".join(thoughts), "tool_calls": calls})


def _call(item: FunctionCall | CustomCall) -> Fields:
    if isinstance(item, CustomCall):
        arguments = custom_arguments(item.input)
    else:
        # Engines refuse a history whose arguments are no JSON object, such as those of a call that was cut short.
        arguments = "{}" if arguments_object(item.arguments) is None else item.arguments
    return {"id": item.call_id, "function": {"name": item.name, "arguments": arguments}}


def _thought(item: Reasoning) -> str:
    parts = item.summary or item.content or []
    return "\n".join(part.text for part in parts if part.text) or opened(item.encrypted_content)


def _output(item: CallOutput) -> str | list[Fields]:
    if isinstance(item.output, str):
        return item.output
    parts = [_part(part) for part in item.output]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _text(item: MessageItem) -> str:
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part) for part in item.content]
    if any(part["type"] != "text" for part in parts):
        raise ResponsesRefused(f"a message of the role {item.role} holds text only", param="input")
    return "".join(part["text"] for part in parts)


def _content(item: MessageItem) -> str | list[Fields]:
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part) for part in item.content]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: ContentPart) -> Fields:
    if isinstance(part, ImageContent):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail or "auto"}}
    assert isinstance(part, TextContent | RefusalContent)
    return {"type": "text", "text": part.text if isinstance(part, TextContent) else part.refusal}


# --- reasoning


def packed(text: str) -> str:
    """A text as ``encrypted_content``."""
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def opened(blob: str | None) -> str:
    """The text in an ``encrypted_content``; empty for one that was not packed here."""
    if not blob or not blob.startswith(PREFIX):
        return ""
    try:
        # Not ``zlib.decompress``, which knows no bound.
        return zlib.decompressobj().decompress(base64.urlsafe_b64decode(blob.removeprefix(PREFIX)), MAX_BYTES).decode()
    except (ValueError, zlib.error):
        return ""


# --- tools


def _tool_fields(request: ResponsesRequest) -> Fields:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of the chat, as far as they are needed."""
    choice = _choice(request.tool_choice or "auto", [tool.name for tool in request.tools])
    if not request.tools:
        return {}
    parallel = request.parallel_tool_calls is not False  # left out or null, it is on
    return {"tools": [_tool(tool) for tool in request.tools], "tool_choice": choice, "parallel_tool_calls": parallel}


def custom_names(request: ResponsesRequest) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.name for tool in request.tools if isinstance(tool, CustomTool))


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return arguments_text({INPUT: text})


def custom_input(arguments: str) -> str:
    """The text in such arguments; all of them where the model did not keep to the form."""
    given = arguments_object(arguments) or {}
    return given[INPUT] if isinstance(given.get(INPUT), str) else arguments


def _tool(tool: FunctionTool | CustomTool) -> Fields:
    # What SGLang's own Responses route makes of it, to the word: the definition stands in the prompt.
    function = {
        "name": tool.name,
        "description": _custom_description(tool) if isinstance(tool, CustomTool) else tool.description,
        "parameters": CUSTOM_PARAMETERS if isinstance(tool, CustomTool) else tool.parameters,
        "strict": isinstance(tool, FunctionTool) and tool.strict is True,
    }
    return {"type": "function", "function": function}


def _custom_description(tool: CustomTool) -> str | None:
    parts = [tool.description] if tool.description else []
    if tool.format and tool.format.get("type") == "grammar":
        # The model reads of the grammar; nothing enforces it.
        syntax, definition = tool.format.get("syntax") or "lark", tool.format.get("definition") or ""
        parts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(parts) or None


def _choice(choice: str | Fields, names: Collection[str]) -> str | Fields:
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise ResponsesRefused('tool_choice="required" requires at least one tool', param="tool_choice")
        return choice
    if choice.get("type") not in ("function", "custom") or not choice.get("name"):
        raise ResponsesRefused(f"the engine cannot force this choice: {json.dumps(choice)}", param="tool_choice")
    if choice["name"] not in names:
        raise ResponsesRefused(f"Tool {choice['name']!r} is not declared in tools", param="tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}
