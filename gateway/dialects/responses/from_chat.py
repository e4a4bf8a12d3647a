"""Translate chat replies to responses: output items, the response object, and its final state."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.gateway.dialects.history import Fields, ReplyMemo, assistant_message, count_of
from forebay.gateway.dialects.responses.request import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    ResponsesRequest,
    TextConfig,
)
from forebay.gateway.dialects.responses.store import ResponseStore
from forebay.gateway.dialects.responses.to_chat import packed
from forebay.gateway.dialects.responses.tools import FunctionTool, OfferedTools, custom_input

ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "store", "temperature", "top_p", "truncation")
ALSO_ECHOED = ("user", "max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "top_logprobs")
STATUSES = {"stop": "completed", "tool_calls": "completed", "function_call": "completed"}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def from_chat(reply: Mapping[str, Any], request: ResponsesRequest, store: ResponseStore, memo: ReplyMemo) -> Fields:
    """Translate the chat reply to ``request``; keeps the response in ``store`` unless the request forbids it."""
    choice = reply["choices"][0]
    answer = assistant_message(choice["message"])
    memo.remember(answer)
    finish_reason = choice.get("finish_reason")
    status = status_of(finish_reason)
    # A failed answer also has items: the output so far, the last item unfinished.
    last = "completed" if status == "completed" else "incomplete"
    begun = response_object(
        request,
        new_id("resp"),
        model=reply.get("model") or request.model,
        output=_output_items(answer, request, last, choice.get("logprobs") if request.includes(LOGPROBS) else None),
        created_at=int(time.time()),
        status=status,
    )
    whole = ended(begun, finish_reason, reply.get("usage") or {})
    if request.store is not False:
        store.add(whole, request.input_items)
    return whole


# --- output items


def _output_items(reply: Mapping[str, Any], request: ResponsesRequest, status: str, logprobs: object) -> list[Fields]:
    """Return the items of an ``assistant_message``, at least one; ``status`` applies to the last one."""
    calls: Sequence[Mapping[str, Any]] = reply.get("tool_calls", [])
    items = [reasoning_item(new_id("rs"), reply["reasoning_content"], request)] if "reasoning_content" in reply else []
    # An empty answer becomes an empty message: otherwise the next request's history would lack it.
    if reply["content"] or not (items or calls):
        part = {**text_part(reply["content"]), "logprobs": _logprobs(logprobs)}
        items.append(message_item(new_id("msg"), [part], "commentary" if calls else "final_answer"))
    tools = OfferedTools(request.tools)
    items += [_call_item(call, tools) for call in calls]
    return [*items[:-1], {**items[-1], "status": status}]


def new_id(prefix: str) -> str:
    """Return a new id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def text_part(text: str) -> Fields:
    """Return a text part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def message_item(item_id: str, content: list[Fields], phase: str | None, status: str = "completed") -> Fields:
    """Return a message item. Its phase says whether calls follow."""
    item = {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}
    return {**item, "phase": phase}


def reasoning_item(item_id: str, text: str, request: ResponsesRequest, status: str = "completed") -> Fields:
    """Return a reasoning item, with a summary or ``encrypted_content`` if the client requested them."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if request.wants_summary and text else [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "encrypted_content": packed(text) if request.includes(ENCRYPTED_REASONING) and text else None,
        "status": status,
    }


def call_item(item_id: str, call_id: str, names: Fields, arguments: str, status: str = "completed") -> Fields:
    """Return a function call item; ``names`` are its name, and its namespace if it has one."""
    item = {"id": item_id, "type": "function_call", "call_id": call_id, **names, "arguments": arguments}
    return {**item, "status": status}


def custom_call_item(item_id: str, call_id: str, names: Fields, text: str, status: str = "completed") -> Fields:
    """Return a custom tool call item."""
    item = {"id": item_id, "type": "custom_tool_call", "call_id": call_id, **names, "input": text}
    return {**item, "status": status}


def _call_item(call: Mapping[str, Any], tools: OfferedTools) -> Fields:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    names = tools.name_fields(name)
    if tools.is_custom(name):
        return custom_call_item(new_id("ctc"), call["id"], names, custom_input(arguments))
    return call_item(new_id("fc"), call["id"], names, arguments)


def _logprobs(logprobs: object) -> list[Fields] | None:
    # OpenAI's logprobs cover the message; an engine's cover every token, including reasoning and calls.
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return [{**token, "top_logprobs": token.get("top_logprobs") or []} for token in content] if content else None


# --- the response object


def status_of(finish_reason: str | None) -> str:
    """Return the status of an answer. One that the engine did not finish has failed."""
    return "incomplete" if finish_reason in INCOMPLETE else STATUSES.get(finish_reason or "", "failed")


def response_object(
    request: ResponsesRequest, response_id: str, *, model: str, output: list[Fields], created_at: int, status: str
) -> Fields:
    """Return a response without its final fields, which ``ended`` adds."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "model": model,
        "output": output,
        "status": status,
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "background": False,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool(tool) for tool in request.tools],
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "text": _text(request.text),
        # Only strings, as in OpenAI's schema: strict clients reject anything else.
        "metadata": {name: value for name, value in (request.metadata or {}).items() if isinstance(value, str)},
        **{name: getattr(request, name) for name in (*ECHOED, *ALSO_ECHOED)},
    }


def ended(begun: Fields, finish_reason: str | None, usage: Mapping[str, Any]) -> Fields:
    """Return a response with its final fields."""
    status = status_of(finish_reason)
    reason = INCOMPLETE.get(finish_reason or "")
    failure = f"the engine did not finish the answer: {finish_reason or 'no finish reason'}"
    return {
        **begun,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": {"reason": reason} if reason else None,
        "error": {"code": "server_error", "message": failure} if status == "failed" else None,
        "usage": _usage(usage) if usage else None,
    }


def _tool(tool: Any) -> Fields:
    fields: Fields = tool.model_dump(exclude_none=True)
    return {**fields, "strict": bool(fields.get("strict"))} if isinstance(tool, FunctionTool) else fields


def _text(text: TextConfig | None) -> Fields:
    fields = text.model_dump(by_alias=True, exclude_none=True, exclude_unset=True) if text else {}
    return {"format": {"type": "text"}, **fields}


def _usage(usage: Mapping[str, Any]) -> Fields:
    cached = count_of(usage, "prompt_tokens_details", "cached_tokens")
    # OpenAI nests the count, SGLang puts it at the top level.
    reasoning = count_of(usage, "completion_tokens_details", "reasoning_tokens") or count_of(usage, "reasoning_tokens")
    sampled, given = count_of(usage, "completion_tokens"), count_of(usage, "prompt_tokens")
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + sampled,
    }
