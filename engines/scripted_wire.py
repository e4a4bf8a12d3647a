"""The bodies of a scripted engine's answers. A token is a word."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Choice = tuple[str, Sequence[Mapping[str, Any]], str]
"""Text, tool calls and finish reason."""


def completion(body: Mapping[str, Any], model: str, choices: Sequence[Choice]) -> dict[str, Any]:
    """A whole ``chat.completion``."""
    prompt_tokens = sum(_words(message.get("content")) for message in body["messages"])
    completion_tokens = sum(_words(text) for text, _, _ in choices)
    return {
        "id": body.get("rid") or "scripted",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or model,
        "choices": [_choice(index, *choice) for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def event_stream(whole: Mapping[str, Any]) -> bytes:
    """The same completion as server-sent events: a chunk for each word, then one with the finish reason."""
    head = {"id": whole["id"], "object": "chat.completion.chunk", "created": whole["created"], "model": whole["model"]}
    chunks = [{**head, "choices": [part]} for choice in whole["choices"] for part in _parts(choice)]
    chunks.append({**head, "choices": [], "usage": whole["usage"]})
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error as SGLang words it."""
    return {"object": "error", "message": message, "type": "ScriptedError", "param": None, "code": status}


def _choice(index: int, text: str, tool_calls: Sequence[Mapping[str, Any]], finish_reason: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if tool_calls:
        message |= {"tool_calls": [dict(call) for call in tool_calls], "content": text or None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


def _parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    for position, word in enumerate((message["content"] or "").split(" ")):
        yield {"index": index, "delta": {"content": f" {word}" if position else word}, "finish_reason": None}
    calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls", []))]
    delta = {"tool_calls": calls} if calls else {}
    yield {"index": index, "delta": delta, "finish_reason": choice["finish_reason"]}


def _words(content: object) -> int:
    return len(content.split()) if isinstance(content, str) else 0
