"""Chat replies as Messages replies: the content blocks, why the answer ended, the counts."""

import base64
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import Fields, ReplyMemo, arguments_object, assistant_message, count_of

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
SIGNATURE = base64.b64encode(b"forebay").decode()
"""Of each block of reasoning. It proves nothing: many clients drop a block whose signature is empty."""


def from_chat(reply: Mapping[str, Any], body: Mapping[str, Any], memo: ReplyMemo) -> Fields:
    """The message for a chat reply to the request ``body``. Raises ``ProtocolRefused`` for a broken off answer."""
    choice = reply["choices"][0]
    stop = stop_fields(choice.get("finish_reason") or "", choice.get("matched_stop"), body.get("stop_sequences"))
    answer = assistant_message(choice["message"])
    memo.remember(answer)
    usage = usage_fields(reply.get("usage") or {})
    return {**message(reply.get("model") or str(body["model"]), _blocks(answer), stop, usage), **edits_field(body)}


def from_tokenize(reply: Mapping[str, Any]) -> Fields:
    """The reply of ``/v1/messages/count_tokens``."""
    return {"input_tokens": reply["count"]}


def from_models(reply: Mapping[str, Any]) -> Fields:
    """The reply of ``/v1/models``, and of ``/v1/models/{model}``, for that of an engine, which lists as OpenAI does."""
    if "data" not in reply:
        return _model(reply)
    models = [_model(card) for card in reply["data"]]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return {"data": models, "has_more": False, **ends}


def _model(card: Mapping[str, Any]) -> Fields:
    created_at = datetime.fromtimestamp(card.get("created") or 0, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created_at}


def message(model: str, content: list[Fields], stop: Fields, usage: Fields) -> Fields:
    """A message; ``stop`` are its two fields on why it ended."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
        **stop,
        "usage": usage,
    }


def _blocks(reply: Mapping[str, Any]) -> list[Fields]:
    content = [thinking_block(reply["reasoning_content"])] if "reasoning_content" in reply else []
    if reply["content"]:
        content.append(text_block(reply["content"]))
    for call in reply.get("tool_calls", []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        # Arguments that are no JSON object, cut short say, become an empty one: this protocol has no other way.
        content.append(tool_use_block(call["id"], name, arguments_object(arguments) or {}))
    return content or [text_block("")]  # clients count on a first block


def text_block(text: str) -> Fields:
    """A block of text."""
    return {"type": "text", "text": text}


def thinking_block(thinking: str, signature: str = SIGNATURE) -> Fields:
    """A block of reasoning."""
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def tool_use_block(call_id: str, name: str, given: Fields) -> Fields:
    """A block of a tool call."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def stop_fields(finish_reason: str, matched_stop: object, stop_sequences: Sequence[str] | None) -> Fields:
    """Why a message ended. Raises ``ProtocolRefused`` where the engine broke it off: half an answer is none."""
    if finish_reason not in STOP_REASONS:
        raise ProtocolRefused(f"the engine broke the answer off: {finish_reason or 'no finish reason'}", 502)
    if finish_reason == "stop" and matched_stop in (stop_sequences or []):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched_stop}
    return {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}


def usage_fields(usage: Mapping[str, Any]) -> Fields:
    """Counts of tokens."""
    prompt = count_of(usage, "prompt_tokens")
    cached = min(count_of(usage, "prompt_tokens_details", "cached_tokens"), prompt)
    return {
        # Anthropic counts without what came from the cache, OpenAI with it.
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count_of(usage, "completion_tokens"),
    }


def edits_field(body: Mapping[str, Any]) -> Fields:
    """To a request that asks for a cleared context: nothing was cleared."""
    return {"context_management": {"applied_edits": []}} if body.get("context_management") else {}
