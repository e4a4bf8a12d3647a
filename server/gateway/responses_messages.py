"""The items of a conversation as chat messages. The same items always give the same messages."""

from collections.abc import Iterable, Sequence

from forebay.server.gateway.protocol_chat import Fields, ReplyMemo, arguments_object, assistant_message
from forebay.server.gateway.responses_errors import ResponsesRefused
from forebay.server.gateway.responses_models import (
    AnyItem,
    CallOutput,
    ContentPart,
    CustomCall,
    FunctionCall,
    Image,
    Message,
    Reasoning,
    Refusal,
    Text,
)
from forebay.server.gateway.responses_reasoning import opened
from forebay.server.gateway.responses_tools import custom_arguments

DEVELOPER = "Developer instructions:\n"
"""Before the text of a developer: chat templates know the role system only."""


def chat_messages(items: Sequence[AnyItem], instructions: str | None, memo: ReplyMemo | None) -> list[Fields]:
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
        elif isinstance(first, Message) and first.role == "user":
            messages.append({"role": "user", "content": _content(first)})
        elif isinstance(first, Message):
            system.append((DEVELOPER if first.role == "developer" else "") + _text(first))
    # One message at the head: most chat templates refuse a second system message.
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def _runs(items: Iterable[AnyItem]) -> list[list[AnyItem]]:
    """The items of one answer of the model together, each other item alone. Empty reasoning is left out."""
    runs: list[list[AnyItem]] = []
    for item in items:
        if isinstance(item, Reasoning) and not _thought(item):
            continue
        if runs and _is_assistants(item) and _is_assistants(runs[-1][0]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _is_assistants(item: AnyItem) -> bool:
    return isinstance(item, FunctionCall | CustomCall | Reasoning) or (
        isinstance(item, Message) and item.role == "assistant"
    )


def _assistant(run: Sequence[AnyItem]) -> Fields:
    texts = [_text(item) for item in run if isinstance(item, Message)]
    thoughts = [_thought(item) for item in run if isinstance(item, Reasoning)]
    calls = [_call(item) for item in run if isinstance(item, FunctionCall | CustomCall)]
    content = "\n\n".join(text for text in texts if text)
    return assistant_message({"content": content, "reasoning_content": "\n".join(thoughts), "tool_calls": calls})


def _call(item: FunctionCall | CustomCall) -> Fields:
    """Engines refuse a history whose arguments are no JSON object, such as those of a call that was cut short."""
    if isinstance(item, CustomCall):
        arguments = custom_arguments(item.input)
    else:
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


def _text(item: Message) -> str:
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part) for part in item.content]
    if any(part["type"] != "text" for part in parts):
        raise ResponsesRefused(f"a message of the role {item.role} holds text only", param="input")
    return "".join(part["text"] for part in parts)


def _content(item: Message) -> str | list[Fields]:
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part) for part in item.content]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: ContentPart) -> Fields:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail or "auto"}}
    assert isinstance(part, Text | Refusal)
    return {"type": "text", "text": part.text if isinstance(part, Text) else part.refusal}
