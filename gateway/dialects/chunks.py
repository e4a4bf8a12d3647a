"""Shared by both stream translations: read the chunks of a chat, and accumulate the reply."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.errors import chunk_status
from forebay.gateway.dialects.history import Fields, ReplyMemo, assistant_message


class ReplyDraft:
    """Accumulates the chunks of a streamed chat with one choice."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.matched_stop: object = None
        self.usage: Fields = {}
        self.model = ""
        self._texts = {"content": "", "reasoning_content": ""}
        self._calls: dict[int, Fields] = {}

    def add(self, chunk: Mapping[str, Any]) -> Fields:
        """Add a chunk and return its delta, empty if it has none."""
        self.usage = chunk.get("usage") or self.usage
        self.model = chunk.get("model") or self.model
        # Only the first: neither protocol supports several choices. The last chunk, with the usage, has none.
        choice = next((choice for choice in chunk.get("choices") or [] if not choice.get("index")), None)
        if choice is None:
            return {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.matched_stop = choice.get("matched_stop", self.matched_stop)  # SGLang's extension
        delta: Fields = choice.get("delta") or {}
        for name in self._texts:
            self._texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        return delta

    def _add_call(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        draft = self._calls.setdefault(_index(call), {"id": "", "function": {"name": "", "arguments": ""}})
        # Id and name arrive once, with the first part; some servers repeat them empty in later parts.
        draft["id"] = call.get("id") or draft["id"]
        draft["function"]["name"] = function.get("name") or draft["function"]["name"]
        draft["function"]["arguments"] += function.get("arguments") or ""

    @property
    def message(self) -> Fields:
        """The accumulated ``assistant_message``."""
        return assistant_message({**self._texts, "tool_calls": list(self._calls.values())})


class AnswerStream(ABC):
    """Converts one answer to events of the agent's protocol: call ``feed`` with each chunk, then ``end``."""

    @abstractmethod
    def feed(self, chunk: Fields) -> list[Fields]:
        """Return the events for one chunk of the chat."""

    @abstractmethod
    def end(self) -> list[Fields]:
        """Return the events after the last chunk. A stream without a finish reason was cut, which is an error."""

    @abstractmethod
    def fail(self, status: int, body: object) -> list[Fields]:
        """Return the events for an engine failure after the first byte was sent."""


class TranslatedStream(AnswerStream):
    """Base of the translated streams. ``is_over`` is true after an error, and no more events follow."""

    def __init__(self, memo: ReplyMemo) -> None:
        self.is_over = False
        self._memo = memo
        self._draft = ReplyDraft()
        self._open_call: int | None = None
        """Index of the call begun last."""
        self._blanks = ""
        """Whitespace after a call that is not sent yet."""

    def feed(self, chunk: Fields) -> list[Fields]:
        if self.is_over:
            return []
        if chunk.get("error"):
            return self.fail(chunk_status(chunk), chunk)
        delta = self._draft.add(chunk)
        events = self._opening(delta)
        if thought := delta.get("reasoning_content"):
            events += self._thinking(thought)
        text, self._blanks = self._blanks + (delta.get("content") or ""), ""
        if self._is_call_open and not text.strip():
            # Engines send whitespace between the calls of an answer; it waits, so that it does not become a text.
            text, self._blanks = "", text
        if text:
            events += self._text(text)
        for call in delta.get("tool_calls") or []:
            function = call.get("function") or {}
            is_begun = not self._is_call_open or _index(call) != self._open_call
            # Both protocols write items one after another, so an interrupted call cannot continue.
            if is_begun and not function.get("name"):
                return events + self.fail(502, "the engine sent arguments for a call that had already ended")
            self._open_call = _index(call)
            events += self._call(call.get("id") or "", function, is_begun=is_begun)
        return events

    @property
    @abstractmethod
    def _is_call_open(self) -> bool:
        """Whether the item begun last is a call."""

    @abstractmethod
    def _opening(self, delta: Mapping[str, Any]) -> list[Fields]:
        """Return the events before those of a delta: the start of the reply, if not sent yet."""

    @abstractmethod
    def _thinking(self, text: str) -> list[Fields]:
        """Return the events for more reasoning."""

    @abstractmethod
    def _text(self, text: str) -> list[Fields]:
        """Return the events for more text."""

    @abstractmethod
    def _call(self, call_id: str, function: Mapping[str, Any], *, is_begun: bool) -> list[Fields]:
        """Return the events for more of a call, which may begin here."""


def _index(call: Mapping[str, Any]) -> int:
    return call.get("index") or 0
