"""What the streams of both translations share: how the chunks of a chat are read, and the reply that they add up to."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.errors import chunk_status
from forebay.gateway.dialects.history import Fields, ReplyMemo, assistant_message


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
        # The first alone: neither protocol knows several choices, and the last chunk, with the usage, has none.
        choice = next((choice for choice in chunk.get("choices") or [] if not choice.get("index")), None)
        if choice is None:
            return {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.matched_stop = choice.get("matched_stop", self.matched_stop)  # SGLang's own field
        delta: Fields = choice.get("delta") or {}
        for name in self._texts:
            self._texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        return delta

    def _add_call(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        draft = self._calls.setdefault(_index(call), {"id": "", "function": {"name": "", "arguments": ""}})
        # Id and name come once, with the first part; some servers send them empty with the others.
        draft["id"] = call.get("id") or draft["id"]
        draft["function"]["name"] = function.get("name") or draft["function"]["name"]
        draft["function"]["arguments"] += function.get("arguments") or ""

    @property
    def message(self) -> Fields:
        """The ``assistant_message`` so far."""
        return assistant_message({**self._texts, "tool_calls": list(self._calls.values())})


class AnswerStream(ABC):
    """The events of one answer, in the protocol of its agent: give it each chunk of the chat, then ``end``."""

    @abstractmethod
    def feed(self, chunk: Fields) -> list[Fields]:
        """The events for one chunk of the chat."""

    @abstractmethod
    def end(self) -> list[Fields]:
        """The events after the last chunk. A stream without a finish reason was cut, which is an error."""

    @abstractmethod
    def fail(self, status: int, body: object) -> list[Fields]:
        """The events when the engine fails after the first byte went out."""


class TranslatedStream(AnswerStream):
    """After an error nothing more comes, and ``is_over`` is true."""

    def __init__(self, memo: ReplyMemo) -> None:
        self.is_over = False
        self._memo = memo
        self._draft = ReplyDraft()
        self._open_call: int | None = None
        """Which call was begun last."""
        self._blanks = ""
        """Of the text after a call, as long as there is nothing else in it."""

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
            # Engines send blanks between the calls of one answer: they wait, so that they do not become a text.
            text, self._blanks = "", text
        if text:
            events += self._text(text)
        for call in delta.get("tool_calls") or []:
            function = call.get("function") or {}
            is_begun = not self._is_call_open or _index(call) != self._open_call
            # Both protocols write one item after the other: a call that another one interrupted cannot go on.
            if is_begun and not function.get("name"):
                return events + self.fail(502, "the engine sent arguments of a call that had ended")
            self._open_call = _index(call)
            events += self._call(call.get("id") or "", function, is_begun=is_begun)
        return events

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
