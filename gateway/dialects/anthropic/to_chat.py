"""Anthropic messages as chat messages. The same history always gives the same messages, however it grows."""

from collections.abc import Iterable, Sequence

from forebay.gateway.dialects.anthropic.errors import MessagesRefused
from forebay.gateway.dialects.anthropic.request import (
    ImageBlock,
    Message,
    Prompt,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from forebay.gateway.dialects.history import Fields, ReplyMemo, arguments_text, assistant_message

Part = TextBlock | ImageBlock | SearchResultBlock | ToolReferenceBlock


def chat_messages(prompt: Prompt, memo: ReplyMemo | None) -> list[Fields]:
    """The chat messages of a prompt, with the replies that ``memo`` knows as the engine wrote them."""
    messages = [*_system(prompt)]
    for message in prompt.messages:
        if message.role == "assistant":
            reply = _assistant(message)
            messages.append(memo.restored(reply) if memo else reply)
        elif message.role == "user":
            messages += _user(message)
    return messages


def _system(prompt: Prompt) -> list[Fields]:
    """One message at the head: most chat templates refuse a second system message."""
    inline = [message.content for message in prompt.messages if message.role == "system"]
    texts = [text for content in (prompt.system or "", *inline) for text in _texts(content)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _texts(content: str | Sequence[object]) -> list[str]:
    if isinstance(content, str):
        return [content] if content.strip() else []
    if not all(isinstance(block, TextBlock) for block in content):
        raise MessagesRefused("a message of the role system holds text only")
    return [block.text for block in content if isinstance(block, TextBlock) and block.text]


def _assistant(message: Message) -> Fields:
    """Texts are joined without a separator: streamed in several blocks, they were one text of the model."""
    if isinstance(message.content, str):
        return assistant_message({"content": message.content})
    texts, thoughts, calls = [], [], []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append({"id": block.id, "function": {"name": block.name, "arguments": arguments_text(block.input)}})
        else:
            raise MessagesRefused(f"a message of the role assistant cannot hold a block of the type {block.type}")
    return assistant_message(
        {"content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls},
    )


def _user(message: Message) -> list[Fields]:
    """The tool results as messages of their own, and what stands between them, in order."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[Fields] = []
    pending: list[Part] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            messages += [*_spoken(pending), *_tool(block)]
            pending = []
        elif isinstance(block, TextBlock | ImageBlock | SearchResultBlock):
            pending.append(block)
        else:
            raise MessagesRefused(f"a message of the role user cannot hold a block of the type {block.type}")
    return [*messages, *_spoken(pending)] if messages or pending else [{"role": "user", "content": ""}]


def _spoken(blocks: Sequence[Part]) -> list[Fields]:
    return [{"role": "user", "content": _content(blocks)}] if blocks else []


def _tool(block: ToolResultBlock) -> list[Fields]:
    if isinstance(block.content, str):
        return [{"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}]
    return [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(run) if run else ""}
        for run in _runs(block.content) or [[]]
    ]


def _runs(blocks: Iterable[Part]) -> list[list[Part]]:
    """Templates resolve references at the head of a tool message only, so that a run of them is a message."""
    runs: list[list[Part]] = []
    for block in blocks:
        if not runs or isinstance(runs[-1][0], ToolReferenceBlock) != isinstance(block, ToolReferenceBlock):
            runs.append([])
        runs[-1].append(block)
    return runs


def _content(blocks: Sequence[Part]) -> str | list[Fields]:
    parts = [_part(block) for block in blocks]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Part) -> Fields:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, ImageBlock):
        return {"type": "image_url", "image_url": {"url": _image_url(block.source)}}
    if isinstance(block, ToolReferenceBlock):
        return {"type": "tool_reference", "name": block.tool_name}
    passage = "\n".join(text.text for text in block.content if text.text)
    lines = [f"Title: {block.title}", f"Source: {block.source}", f"Content: {passage}"]
    return {"type": "text", "text": "\n".join(lines if passage else lines[:2])}


def _image_url(source: Fields) -> str:
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return f"data:{media_type};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise MessagesRefused("source: an image needs either type base64 with media_type and data, or type url with url")
