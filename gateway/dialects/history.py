"""Shared by both request translations: engine-specific fields, and chat replies that return in a history."""

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
"""SGLang's own fields of a chat, which neither protocol defines. They are copied to the chat unchanged."""

STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
"""Requests usage in every chunk: a Messages stream begins with its prompt's token count."""


def split_engine_fields(body: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Split a body into the protocol's fields and the engine's fields."""
    own = {name: value for name, value in body.items() if name not in ENGINE_FIELDS}
    return own, {name: value for name, value in body.items() if name in ENGINE_FIELDS and value is not None}


def first_problem(error: ValidationError) -> tuple[list[str | int], str]:
    """Return the path and message of the first error."""
    problem = error.errors(include_url=False, include_input=False)[0]
    # Pydantic adds the tried member of a union to the path; the tags of our unions begin with "~".
    place = [part for part in problem["loc"] if not str(part).startswith("~")]
    return place, problem["msg"]


def assistant_message(message: Mapping[str, Any]) -> Fields:
    """Return the assistant message of a chat reply in the format of the next chat's history.

    Drops fields without a value. ``content`` is a text, or None together with tool calls.
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
    """Return the count at ``names`` in an engine's usage; 0 if it is missing or not a positive integer."""
    for name in names:
        usage = usage.get(name) if isinstance(usage, Mapping) else None
    return usage if type(usage) is int and usage > 0 else 0


def arguments_text(arguments: object) -> str:
    """Format arguments as chat templates do (``tojson`` of transformers)."""
    return json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: str) -> Fields | None:
    """Parse arguments; None if they are not a JSON object, or are nested too deeply."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class ReplyMemo:
    """The tool calls of a rollout in the engine's original text, for histories that return them reformatted.

    Clients return arguments as an object, or as JSON that differs from the sampled text. If the meaning is equal, the
    history gets the model's original text, so that the next prompt continues the tokens of the previous one.
    """

    def __init__(self) -> None:
        # Some models count their calls from 0 in every turn, so an id may belong to several calls.
        self._arguments: defaultdict[str, list[str]] = defaultdict(list)
        self._contents: defaultdict[str, list[str | None]] = defaultdict(list)

    def remember(self, message: Mapping[str, Any]) -> None:
        """Store an ``assistant_message``."""
        for call in message.get("tool_calls", []):
            self._arguments[call["id"]].append(call["function"]["arguments"])
            self._contents[call["id"]].append(message["content"])

    def restored(self, message: Mapping[str, Any]) -> Fields:
        """Restore the original arguments and whitespace of an ``assistant_message`` from a history."""
        if not message.get("tool_calls"):
            return dict(message)
        calls = [self._restored_call(call) for call in message["tool_calls"]]
        # Clients trim the text before a call: the sampled whitespace is restored by the id of the first call.
        words = (message["content"] or "").split()
        said = (text for text in reversed(self._contents.get(calls[0]["id"], [])) if (text or "").split() == words)
        return {**message, "content": next(said, message["content"]), "tool_calls": calls}

    def _restored_call(self, call: Fields) -> Fields:
        function = call["function"]
        # Newest first: if an id belongs to several calls, the history most likely continues the newest.
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
    """Compare JSON values; ``true`` does not equal 1, but 1.0 equals 1, because clients may rewrite it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
