"""What both translations need of requests: the engine's own fields, and chat replies that come back in a history."""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

Fields = dict[str, Any]

ENGINE_FIELDS = frozenset(
    {
        *("chat_template_kwargs", "custom_params", "priority", "extra_key", "cache_salt", "lora_path"),
        *("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "logit_bias", "min_tokens"),
        *("ignore_eos", "skip_special_tokens", "no_stop_trim", "stop_token_ids", "stop_regex", "regex", "ebnf"),
    }
)
"""SGLang's own fields of a chat, which neither protocol knows. They reach the chat as they came."""

STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
"""Usage with every chunk: a Messages stream begins with the count of its prompt."""


def split_engine_fields(body: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """The fields that a protocol must know, and those that are the engine's."""
    own = {name: value for name, value in body.items() if name not in ENGINE_FIELDS}
    return own, {name: value for name, value in body.items() if name in ENGINE_FIELDS and value is not None}


def first_problem(error: ValidationError) -> tuple[list[str | int], str]:
    """Where a body is wrong first, and what is wrong there."""
    problem = error.errors(include_url=False, include_input=False)[0]
    # Pydantic names the member of a union that it tried as a part of the place; ours have names with a "~".
    place = [part for part in problem["loc"] if not str(part).startswith("~")]
    return place, problem["msg"]


def assistant_message(message: Mapping[str, Any]) -> Fields:
    """The assistant message of a chat reply as it stands in the history of the next chat.

    Fields without a value go. ``content`` is a text, or None beside tool calls.
    """
    calls = [_call(call) for call in message.get("tool_calls") or []]
    plain: Fields = {"role": "assistant", "content": message.get("content") or (None if calls else "")}
    if message.get("reasoning_content"):
        plain["reasoning_content"] = message["reasoning_content"]
    return {**plain, "tool_calls": calls} if calls else plain


def _call(call: Mapping[str, Any]) -> Fields:
    function = call.get("function") or {}
    plain = {"name": function.get("name") or "", "arguments": function.get("arguments") or ""}
    return {"id": call.get("id") or "", "type": "function", "function": plain}


def count_of(usage: object, *names: str) -> int:
    """The count under ``names`` in an engine's usage; 0 where there is none, or anything else in its place."""
    for name in names:
        usage = usage.get(name) if isinstance(usage, Mapping) else None
    return usage if type(usage) is int and usage > 0 else 0


def arguments_text(arguments: object) -> str:
    """Arguments as chat templates write them (``tojson`` of transformers)."""
    return json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: str) -> Fields | None:
    """Arguments as an object; None where they are not the text of one, or are nested beyond reason."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class ReplyMemo:
    """The tool calls of a rollout as the engine wrote them, for histories that come back in other words.

    A client hands arguments back as an object, or in other JSON than the model sampled. Where the meaning is the same,
    the history gets the model's own text again, and the next prompt continues the tokens of the last one.
    """

    def __init__(self) -> None:
        # Some models count their calls from 0 in every turn, so that an id may stand for several.
        self._arguments: defaultdict[str, list[str]] = defaultdict(list)
        self._contents: defaultdict[str, list[str | None]] = defaultdict(list)

    def remember(self, message: Mapping[str, Any]) -> None:
        """Keep an ``assistant_message``."""
        for call in message.get("tool_calls", []):
            self._arguments[call["id"]].append(call["function"]["arguments"])
            self._contents[call["id"]].append(message["content"])

    def restored(self, message: Mapping[str, Any]) -> Fields:
        """An ``assistant_message`` of a history with its arguments, and the blanks of its text, as they were."""
        if not message.get("tool_calls"):
            return dict(message)
        calls = [self._restored_call(call) for call in message["tool_calls"]]
        # Clients trim the text before a call: the blanks that the model sampled come back by the id of its first call.
        words = (message["content"] or "").split()
        said = (text for text in reversed(self._contents.get(calls[0]["id"], [])) if (text or "").split() == words)
        return {**message, "content": next(said, message["content"]), "tool_calls": calls}

    def _restored_call(self, call: Fields) -> Fields:
        function = call["function"]
        # The newest first: where an id stands for several calls, the history most likely goes on from that one.
        known = reversed(self._arguments.get(call["id"], []))
        sampled = next((text for text in known if _same_object(text, function["arguments"])), function["arguments"])
        return {**call, "function": {**function, "arguments": sampled}}


def _same_object(first: str, second: str) -> bool:
    one, other = arguments_object(first), arguments_object(second)
    try:
        return one is not None and other is not None and _same(one, other)
    except RecursionError:
        return False


def _same(one: object, other: object) -> bool:
    """Equality of JSON values, for which ``true`` is not 1. A client may write 1.0 as 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
