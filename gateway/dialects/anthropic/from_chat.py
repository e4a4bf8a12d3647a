"""Translate chat replies to Messages replies: content blocks, stop reason, token counts."""

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
"""Signature of every thinking block. It proves nothing, but many clients drop a block with an empty signature."""


def from_chat(reply: Mapping[str, Any], body: Mapping[str, Any], memo: ReplyMemo) -> Fields:
    """Translate the chat reply to the request ``body``. Raises ``ProtocolRefused`` for an unfinished answer."""
    choice = reply["choices"][0]
    stop = stop_fields(choice.get("finish_reason") or "", choice.get("matched_stop"), body.get("stop_sequences"))
    answer = assistant_message(choice["message"])
    memo.remember(answer)
    usage = usage_fields(reply.get("usage") or {})
    return {**message(reply.get("model") or str(body["model"]), _blocks(answer), stop, usage), **edits_field(body)}


def from_tokenize(reply: Mapping[str, Any]) -> Fields:
    """Return the reply of ``/v1/messages/count_tokens``."""
    return {"input_tokens": reply["count"]}


def from_models(reply: Mapping[str, Any]) -> Fields:
    """Translate an engine's list of models, or one model, to the reply of ``/v1/models`` or ``/v1/models/{model}``."""
    if "data" not in reply:
        return _model(reply)
    models = [_model(card) for card in reply["data"]]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return {"data": models, "has_more": False, **ends}


def _model(card: Mapping[str, Any]) -> Fields:
    created_at = datetime.fromtimestamp(card.get("created") or 0, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created_at}


def message(model: str, content: list[Fields], stop: Fields, usage: Fields) -> Fields:
    """Build a message; ``stop`` holds its two fields on why it ended."""
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
        # Arguments that are not a JSON object, such as truncated ones, become an empty object, as the protocol demands.
        content.append(tool_use_block(call["id"], name, arguments_object(arguments) or {}))
    return content or [text_block("")]  # clients expect at least one block


def text_block(text: str) -> Fields:
    """Return a text block."""
    return {"type": "text", "text": text}


def thinking_block(thinking: str, signature: str = SIGNATURE) -> Fields:
    """Return a thinking block."""
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def tool_use_block(call_id: str, name: str, given: Fields) -> Fields:
    """Return a tool use block."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def stop_fields(finish_reason: str, matched_stop: object, stop_sequences: Sequence[str] | None) -> Fields:
    """Return why a message ended. Raises ``ProtocolRefused`` if the engine did not finish the answer."""
    if finish_reason not in STOP_REASONS:
        raise ProtocolRefused(f"the engine did not finish the answer: {finish_reason or 'no finish reason'}", 502)
    if finish_reason == "stop" and matched_stop in (stop_sequences or []):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched_stop}
    return {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}


def usage_fields(usage: Mapping[str, Any]) -> Fields:
    """Return token counts."""
    prompt = count_of(usage, "prompt_tokens")
    cached = min(count_of(usage, "prompt_tokens_details", "cached_tokens"), prompt)
    return {
        # Anthropic's input count excludes cached tokens, OpenAI's includes them.
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count_of(usage, "completion_tokens"),
    }


def edits_field(body: Mapping[str, Any]) -> Fields:
    """Answer a request for context edits: none was applied."""
    return {"context_management": {"applied_edits": []}} if body.get("context_management") else {}
