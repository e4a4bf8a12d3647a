"""Translate Messages requests to chat requests: the history with its tool results, the tools, the sampling.

A growing history always yields the same chat messages for its old part, so that the next prompt continues the tokens
of the previous one.
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
    """Translate a Messages request to a chat request. Raises ``ProtocolRefused``.

    ``unknown`` gets the names of features that were left out or passed on unchecked.
    """
    request, engine_fields = parsed(MessagesRequest, body, unknown)
    chat = {**_prompt(request, memo, unknown), "max_tokens": request.max_tokens, **_sampling(request, unknown)}
    if request.stream:
        chat |= {"stream": True, "stream_options": STREAM_OPTIONS}
    return _with_engine_fields(chat, engine_fields)


def to_tokenize(body: Fields, memo: ReplyMemo, unknown: UnknownFieldLog) -> Fields:
    """Return the body for SGLang's ``/tokenize`` that counts the tokens of a prompt. Raises ``ProtocolRefused``."""
    prompt, engine_fields = parsed(MessagesPrompt, body, unknown)
    return _with_engine_fields(_prompt(prompt, memo, unknown), engine_fields)


def _prompt(prompt: MessagesPrompt, memo: ReplyMemo, unknown: UnknownFieldLog) -> Fields:
    messages = _chat_messages(prompt, memo, unknown)
    chat = {"model": prompt.model, "messages": messages, **_tool_fields(prompt), **_reasoning(prompt, unknown)}
    # Otherwise SGLang would present the model's own text as the user's.
    return {**chat, "continue_final_message": True} if messages and messages[-1]["role"] == "assistant" else chat


def _reasoning(prompt: MessagesPrompt, unknown: UnknownFieldLog) -> Fields:
    fields: Fields = {}
    if prompt.thinking and prompt.thinking.type not in THINKING:
        unknown.left_out("thinking", prompt.thinking.type)
    elif prompt.thinking:
        thinks = prompt.thinking.type != "disabled"
        # Both names of the switch: templates use either the first (DeepSeek) or the second (Qwen).
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
    """Return the chat messages of a prompt; replies known to ``memo`` get their original text."""
    messages = [*_system(prompt, unknown)]
    for message in prompt.messages:
        if message.role == "assistant":
            messages.append(memo.restored(_assistant(message, unknown)))
        elif message.role == "user":
            messages += _user(message, unknown)
    return messages


def _system(prompt: MessagesPrompt, unknown: UnknownFieldLog) -> list[Fields]:
    # One message at the start: most chat templates reject a second system message.
    inline = [message.content for message in prompt.messages if message.role == "system"]
    texts = [text for content in (prompt.system or "", *inline) for text in _texts(content, unknown)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _texts(content: str | Sequence[Block], unknown: UnknownFieldLog) -> list[str]:
    if isinstance(content, str):
        return [content] if content.strip() else []
    for block in content:
        if not isinstance(block, TextBlock):  # chat templates accept only text here
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
        elif isinstance(block, UnknownPart):  # from Anthropic's servers, such as a server tool or redacted thinking
            unknown.left_out("content", block.type)
        else:
            raise ProtocolRefused(f"a message with role assistant cannot contain a block of type {block.type}")
    # No separator: streamed in several blocks, these were one text of the model.
    return assistant_message(
        {"content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls},
    )


def _user(message: InputMessage, unknown: UnknownFieldLog) -> list[Fields]:
    """Return each tool result as its own message, and the content between them, in order."""
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
            raise ProtocolRefused(f"a message with role user cannot contain a block of type {block.type}")
    # An empty list is also a message: otherwise two answers of the model would be adjacent.
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
    # Templates resolve references only at the start of a tool message, so each run of them becomes a message.
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
    """Return the chat's ``tools``, ``tool_choice`` and ``parallel_tool_calls``, as far as needed."""
    choice = prompt.tool_choice
    if not prompt.tools:
        # Like Anthropic's API, reject a choice without tools only if it demands a call.
        if choice is not None and choice.type in ("any", "tool"):
            raise ProtocolRefused(f"tool_choice: type {choice.type!r} needs at least one tool")
        return {}
    fields: Fields = {"tools": [_tool_definition(tool) for tool in prompt.tools]}
    if choice is None:
        return {**fields, "tool_choice": "auto"}
    return {**fields, **_tool_choice(choice, prompt), "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _tool_definition(tool: MessagesTool) -> Fields:
    # Identical to SGLang's own Messages route, because the definition is part of the prompt.
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
