"""Messages requests as chat requests: the history with its tool results, the tools, the sampling.

The same history always gives the same chat messages, however it grows: the next prompt goes on from the last one's
tokens.
"""

from collections.abc import Iterable, Sequence

from forebay.gateway.dialects.anthropic.request import (
    Block,
    ImageBlock,
    InputMessage,
    MessagesPrompt,
    MessagesRequest,
    MessagesTool,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    parsed,
)
from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import STREAM_OPTIONS, Fields, ReplyMemo, arguments_text, assistant_message
from forebay.gateway.dialects.unknown import UnknownFieldLog, UnknownPart

Part = TextBlock | ImageBlock | SearchResultBlock | ToolReferenceBlock | UnknownPart
THINKING = ("enabled", "disabled", "adaptive")


def to_chat(body: Fields, memo: ReplyMemo, unknown: UnknownFieldLog) -> Fields:
    """The chat request for a Messages request. Raises ``ProtocolRefused``.

    ``unknown`` gets the names of what was left out or passed on unread.
    """
    request, engine_fields = parsed(MessagesRequest, body, unknown)
    chat = {**_prompt(request, memo, unknown), "max_tokens": request.max_tokens, **_sampling(request, unknown)}
    if request.stream:
        chat |= {"stream": True, "stream_options": STREAM_OPTIONS}
    return _with_engine_fields(chat, engine_fields)


def to_tokenize(body: Fields, memo: ReplyMemo, unknown: UnknownFieldLog) -> Fields:
    """The body for SGLang's ``/tokenize`` that counts the tokens of a Messages prompt. Raises ``ProtocolRefused``."""
    prompt, engine_fields = parsed(MessagesPrompt, body, unknown)
    return _with_engine_fields(_prompt(prompt, memo, unknown), engine_fields)


def _prompt(prompt: MessagesPrompt, memo: ReplyMemo, unknown: UnknownFieldLog) -> Fields:
    messages = _chat_messages(prompt, memo, unknown)
    chat = {"model": prompt.model, "messages": messages, **_tool_fields(prompt), **_reasoning(prompt, unknown)}
    # Else SGLang would give the model its own words as the user's.
    return {**chat, "continue_final_message": True} if messages and messages[-1]["role"] == "assistant" else chat


def _reasoning(prompt: MessagesPrompt, unknown: UnknownFieldLog) -> Fields:
    fields: Fields = {}
    if prompt.thinking and prompt.thinking.type not in THINKING:
        unknown.left_out("thinking", prompt.thinking.type)
    elif prompt.thinking:
        thinks = prompt.thinking.type != "disabled"
        # Both words for the switch: templates know either the one (DeepSeek's) or the other (Qwen's).
        fields["chat_template_kwargs"] = {"thinking": thinks, "enable_thinking": thinks}
    effort = prompt.output_config.effort if prompt.output_config else None
    return {**fields, "reasoning_effort": "max" if effort == "xhigh" else effort} if effort else fields


def _sampling(request: MessagesRequest, unknown: UnknownFieldLog) -> Fields:
    fields: Fields = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }
    wanted = request.output_config.format if request.output_config else None
    if wanted and wanted.type != "json_schema":
        unknown.left_out("output_config_format", wanted.type)
    elif wanted:
        schema = {"name": "response", "schema": wanted.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in fields.items() if value is not None}


def _with_engine_fields(chat: Fields, engine_fields: Fields) -> Fields:
    template = {**chat.get("chat_template_kwargs", {}), **engine_fields.get("chat_template_kwargs", {})}
    return {**chat, **engine_fields, **({"chat_template_kwargs": template} if template else {})}


# --- messages


def _chat_messages(prompt: MessagesPrompt, memo: ReplyMemo, unknown: UnknownFieldLog) -> list[Fields]:
    """The chat messages of a prompt, with the replies that ``memo`` knows as the engine wrote them."""
    messages = [*_system(prompt, unknown)]
    for message in prompt.messages:
        if message.role == "assistant":
            messages.append(memo.restored(_assistant(message, unknown)))
        elif message.role == "user":
            messages += _user(message, unknown)
    return messages


def _system(prompt: MessagesPrompt, unknown: UnknownFieldLog) -> list[Fields]:
    # One message at the head: most chat templates refuse a second system message.
    inline = [message.content for message in prompt.messages if message.role == "system"]
    texts = [text for content in (prompt.system or "", *inline) for text in _texts(content, unknown)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _texts(content: str | Sequence[Block], unknown: UnknownFieldLog) -> list[str]:
    if isinstance(content, str):
        return [content] if content.strip() else []
    for block in content:
        if not isinstance(block, TextBlock):  # chat templates know a text alone here
            unknown.left_out("system", block.type)
    return [block.text for block in content if isinstance(block, TextBlock) and block.text]


def _assistant(message: InputMessage, unknown: UnknownFieldLog) -> Fields:
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
        elif isinstance(block, UnknownPart):  # what a server of Anthropic's did or hid
            unknown.left_out("content", block.type)
        else:
            raise ProtocolRefused(f"a message of the role assistant cannot hold a block of the type {block.type}")
    # Without a separator: streamed in several blocks, the texts were one text of the model.
    return assistant_message(
        {"content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls},
    )


def _user(message: InputMessage, unknown: UnknownFieldLog) -> list[Fields]:
    """The tool results as messages of their own, and what stands between them, in order."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[Fields] = []
    pending: list[Part] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            messages += [*_spoken(pending, unknown), *_tool_messages(block, unknown)]
            pending = []
        elif isinstance(block, TextBlock | ImageBlock | SearchResultBlock | UnknownPart):
            pending.append(block)
        else:
            raise ProtocolRefused(f"a message of the role user cannot hold a block of the type {block.type}")
    # An empty list is a message too: without one, two answers of the model would follow each other.
    return [*messages, *_spoken(pending, unknown)] if messages or pending else [{"role": "user", "content": ""}]


def _spoken(blocks: Sequence[Part], unknown: UnknownFieldLog) -> list[Fields]:
    return [{"role": "user", "content": _content(blocks, unknown)}] if blocks else []


def _tool_messages(block: ToolResultBlock, unknown: UnknownFieldLog) -> list[Fields]:
    if isinstance(block.content, str):
        return [{"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}]
    return [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(run, unknown) if run else ""}
        for run in _runs(block.content) or [[]]
    ]


def _runs(blocks: Iterable[Part]) -> list[list[Part]]:
    # Templates resolve references at the head of a tool message only, so that a run of them is a message.
    runs: list[list[Part]] = []
    for block in blocks:
        if not runs or isinstance(runs[-1][0], ToolReferenceBlock) != isinstance(block, ToolReferenceBlock):
            runs.append([])
        runs[-1].append(block)
    return runs


def _content(blocks: Sequence[Part], unknown: UnknownFieldLog) -> str | list[Fields]:
    parts = [_part(block, unknown) for block in blocks]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Part, unknown: UnknownFieldLog) -> Fields:
    if isinstance(block, UnknownPart):
        unknown.passed_on("content", block.type)
        return block.given
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
    raise ProtocolRefused("source: an image needs either type base64 with media_type and data, or type url with url")


# --- tools


def _tool_fields(prompt: MessagesPrompt) -> Fields:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of the chat, as far as they are needed."""
    choice = prompt.tool_choice
    if not prompt.tools:
        # A choice without tools is refused only where it asks for a call, as by Anthropic's API.
        if choice is not None and choice.type in ("any", "tool"):
            raise ProtocolRefused(f"tool_choice: the type {choice.type!r} needs at least one tool")
        return {}
    fields: Fields = {"tools": [_tool_definition(tool) for tool in prompt.tools]}
    if choice is None:
        return {**fields, "tool_choice": "auto"}
    return {**fields, **_tool_choice(choice, prompt), "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _tool_definition(tool: MessagesTool) -> Fields:
    # What SGLang's own Messages route makes of it, to the word: the definition stands in the prompt.
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"},
        "strict": tool.strict,
    }
    deferred = {} if tool.defer_loading is None else {"defer_loading": tool.defer_loading}
    return {"type": "function", "function": function, **deferred}


def _tool_choice(choice: ToolChoice, prompt: MessagesPrompt) -> Fields:
    if choice.type != "tool":
        return {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}[choice.type]}
    if choice.name not in [tool.name for tool in prompt.tools]:
        raise ProtocolRefused(f"tool_choice.name: {choice.name!r} is not among the tools")
    return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
