"""The chat reply that a stream of chunks adds up to."""

from collections.abc import Mapping
from typing import Any

from forebay.server.gateway.protocol_chat import Fields, assistant_message


class ReplyDraft:
    """Takes the chunks of a streamed chat with one choice."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.matched_stop: object = None
        self.usage: Fields = {}
        self.model = ""
        self._texts = {"content": "", "reasoning_content": ""}
        self._calls: dict[int, Fields] = {}

    def add(self, chunk: Mapping[str, Any]) -> Fields:
        """Take a chunk; returns its delta, empty where it has none."""
        self.usage = chunk.get("usage") or self.usage
        self.model = chunk.get("model") or self.model
        choice = next((choice for choice in chunk.get("choices") or [] if not choice.get("index")), None)
        if choice is None:
            return {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.matched_stop = choice.get("matched_stop", self.matched_stop)
        delta: Fields = choice.get("delta") or {}
        for name in self._texts:
            self._texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        return delta

    def _add_call(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        held = self._calls.setdefault(call.get("index") or 0, {"id": "", "function": {"name": "", "arguments": ""}})
        held["id"] = call.get("id") or held["id"]
        held["function"]["name"] = function.get("name") or held["function"]["name"]
        held["function"]["arguments"] += function.get("arguments") or ""

    @property
    def message(self) -> Fields:
        """The ``assistant_message`` so far."""
        return assistant_message({**self._texts, "tool_calls": list(self._calls.values())})
