"""The output items of an answer."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.server.gateway.protocol_chat import Fields
from forebay.server.gateway.responses_reasoning import packed
from forebay.server.gateway.responses_request import ENCRYPTED_REASONING, ResponsesRequest
from forebay.server.gateway.responses_tools import custom_input, custom_names


def output_items(reply: Mapping[str, Any], request: ResponsesRequest, status: str, logprobs: object) -> list[Fields]:
    """The items of an ``assistant_message``, at least one; ``status`` is that of the last one.

    An empty answer is an empty message: else it would be missing in the history of the next request.
    """
    calls: Sequence[Mapping[str, Any]] = reply.get("tool_calls", [])
    items = [reasoning_item(new_id("rs"), reply["reasoning_content"], request)] if "reasoning_content" in reply else []
    if reply["content"] or not (items or calls):
        part = {**text_part(reply["content"]), "logprobs": _logprobs(logprobs)}
        items.append(message_item(new_id("msg"), [part], "commentary" if calls else "final_answer"))
    items += [_call_item(call, request) for call in calls]
    return [*items[:-1], {**items[-1], "status": status}]


def new_id(prefix: str) -> str:
    """An id for an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def text_part(text: str) -> Fields:
    """A part of text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def message_item(item_id: str, content: list[Fields], phase: str | None, status: str = "completed") -> Fields:
    """A message. Its phase tells whether calls follow."""
    item = {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}
    return {**item, "phase": phase}


def reasoning_item(item_id: str, text: str, request: ResponsesRequest, status: str = "completed") -> Fields:
    """The reasoning; as a summary too, and packed, where the client asked for that."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if request.wants_summary and text else [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "encrypted_content": packed(text) if request.includes(ENCRYPTED_REASONING) and text else None,
        "status": status,
    }


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> Fields:
    """A call of a function."""
    item = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return {**item, "status": status}


def custom_call_item(item_id: str, call_id: str, name: str, text: str, status: str = "completed") -> Fields:
    """A call of a custom tool."""
    item = {"id": item_id, "type": "custom_tool_call", "call_id": call_id, "name": name, "input": text}
    return {**item, "status": status}


def _call_item(call: Mapping[str, Any], request: ResponsesRequest) -> Fields:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name in custom_names(request):
        return custom_call_item(new_id("ctc"), call["id"], name, custom_input(arguments))
    return call_item(new_id("fc"), call["id"], name, arguments)


def _logprobs(logprobs: object) -> list[Fields] | None:
    """Those of the chat; they cover every token sampled, reasoning and calls included."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return [{**token, "top_logprobs": token.get("top_logprobs") or []} for token in content] if content else None
