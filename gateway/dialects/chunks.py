"""What the streams of the Responses and the Messages protocol share: how the chunks of a chat are read.

The chat reply that a stream of chunks adds up to.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.history import Fields, ReplyMemo, assistant_message, error_status


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


class ProtocolStream(ABC):
    """Give it each chunk, then ``end``; ``event_bytes`` writes what it returns.

    After an error nothing more comes, and ``is_over`` is true.
    """

    def __init__(self, memo: ReplyMemo | None) -> None:
        self.is_over = False
        self._memo = memo
        self._draft = ReplyDraft()
        self._open_call: int | None = None
        """Which call was begun last."""
        self._blanks = ""

    def feed(self, chunk: Mapping[str, Any]) -> list[Fields]:
        """The events for one chunk of the chat."""
        if self.is_over:
            return []
        if chunk.get("error"):
            return self.fail(error_status(chunk), chunk)
        delta = self._draft.add(chunk)
        events = self._opening(delta)
        if thought := delta.get("reasoning_content"):
            events += self._thinking(thought)
        if text := self._held_back(delta.get("content") or ""):
            events += self._text(text)
        for call in delta.get("tool_calls") or []:
            function = call.get("function") or {}
            is_begun = not self._goes_on(call)
            if is_begun and not function.get("name"):
                return events + self.fail(502, "the engine sent arguments of a call that had ended")
            self._open_call = _index(call)
            events += self._call(call.get("id") or "", function, is_begun=is_begun)
        return events

    def _goes_on(self, call: Mapping[str, Any]) -> bool:
        """Whether a part of a call belongs to the one that is open; else it must begin another."""
        return self._is_call_open and _index(call) == self._open_call

    def _held_back(self, text: str) -> str:
        """Blanks after a call wait for a text: engines send them between the calls of one answer."""
        text, self._blanks = self._blanks + text, ""
        if self._is_call_open and not text.strip():
            text, self._blanks = "", text
        return text

    @abstractmethod
    def end(self) -> list[Fields]:
        """The events after the last chunk. A stream without a finish reason was cut, which is an error."""

    @abstractmethod
    def fail(self, status: int, body: object) -> list[Fields]:
        """The events when the engine fails after the first byte went out."""

    @property
    @abstractmethod
    def _is_call_open(self) -> bool:
        """Whether what was begun last is a call."""

    @abstractmethod
    def _opening(self, delta: Mapping[str, Any]) -> list[Fields]:
        """What goes before the events of a delta: the beginning, if it has not gone out."""

    @abstractmethod
    def _thinking(self, text: str) -> list[Fields]:
        """More of a thought."""

    @abstractmethod
    def _text(self, text: str) -> list[Fields]:
        """More of a text."""

    @abstractmethod
    def _call(self, call_id: str, function: Mapping[str, Any], *, is_begun: bool) -> list[Fields]:
        """More of a call, which may begin with it."""


def _index(call: Mapping[str, Any]) -> int:
    return call.get("index") or 0
