"""The response object."""

import time
from collections.abc import Mapping
from typing import Any

from forebay.server.gateway.protocol_chat import Fields
from forebay.server.gateway.responses_models import FunctionTool
from forebay.server.gateway.responses_request import ResponsesRequest, TextConfig

ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "store", "temperature", "top_p", "truncation")
ALSO_ECHOED = ("user", "max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "top_logprobs")
STATUSES = {"stop": "completed", "tool_calls": "completed", "function_call": "completed"}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def status_of(finish_reason: str | None) -> str:
    """What became of an answer. One that the engine broke off has failed: half an answer is none."""
    return "incomplete" if finish_reason in INCOMPLETE else STATUSES.get(finish_reason or "", "failed")


def response(
    request: ResponsesRequest, response_id: str, *, model: str, output: list[Fields], created_at: int, status: str
) -> Fields:
    """A response without an end: ``ended`` adds it."""
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
        "metadata": request.metadata or {},
        **{name: getattr(request, name) for name in (*ECHOED, *ALSO_ECHOED)},
    }


def ended(told: Fields, finish_reason: str | None, usage: Mapping[str, Any]) -> Fields:
    """A response with what its end decides."""
    status = status_of(finish_reason)
    reason = INCOMPLETE.get(finish_reason or "")
    failure = f"the engine broke the answer off: {finish_reason or 'no finish reason'}"
    return {
        **told,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": {"reason": reason} if reason else None,
        "error": {"code": "server_error", "message": failure} if status == "failed" else None,
        "usage": _usage(usage) if usage else None,
    }


def _tool(tool: Any) -> Fields:
    told: Fields = tool.model_dump(exclude_none=True)
    return {**told, "strict": bool(told.get("strict"))} if isinstance(tool, FunctionTool) else told


def _text(text: TextConfig | None) -> Fields:
    told = text.model_dump(by_alias=True, exclude_none=True, exclude_unset=True) if text else {}
    return {"format": {"type": "text"}, **told}


def _usage(usage: Mapping[str, Any]) -> Fields:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    told = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    sampled, given = usage.get("completion_tokens") or 0, usage.get("prompt_tokens") or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": told or usage.get("reasoning_tokens") or 0},
        "total_tokens": given + sampled,
    }
