"""A streamed chat as the events of a streamed Anthropic message."""

from collections.abc import Mapping
from typing import Any

from forebay.server.gateway.anthropic_errors import MessagesRefused, error
from forebay.server.gateway.anthropic_reply import (
    edits_field,
    message,
    stop_fields,
    text_block,
    thinking_block,
    tool_use_block,
    usage_fields,
)
from forebay.server.gateway.protocol_chat import Fields, ReplyMemo, error_status
from forebay.server.gateway.protocol_draft import ReplyDraft


class EventStream:
    """Give it each chunk, then ``end``; ``event_bytes`` writes what it returns.

    ``body`` is the Messages request. After an error nothing more comes, and ``is_over`` is true.
    """

    def __init__(self, body: Mapping[str, Any], memo: ReplyMemo | None = None) -> None:
        self.is_over = False
        self._body = body
        self._memo = memo
        self._draft = ReplyDraft()
        self._started = False
        self._index = -1
        self._open = ""
        self._open_call: int | None = None
        self._blanks = ""

    def feed(self, chunk: Mapping[str, Any]) -> list[Fields]:
        """The events for one chunk of the chat."""
        if self.is_over:
            return []
        if chunk.get("error"):
            return self.fail(error_status(chunk), chunk)
        delta = self._draft.add(chunk)
        events = self._thinking(delta.get("reasoning_content")) + self._text(delta.get("content"))
        for call in delta.get("tool_calls") or []:
            if not self._fits(call):
                return self.fail(502, "the engine sent arguments of a call that had ended")
            events += self._call(call)
        # The first chunk of an engine may have a role only, and no counts yet.
        return self._start() + events if events or self._draft.finish_reason else []

    def end(self) -> list[Fields]:
        """The events after the last chunk. A stream without a finish reason was cut, which is an error."""
        if self.is_over:
            return []
        draft = self._draft
        try:
            stop = stop_fields(draft.finish_reason or "", draft.matched_stop, self._body.get("stop_sequences"))
        except MessagesRefused as refused:
            return self.fail(refused.status, refused.body)
        if self._memo:
            self._memo.remember(draft.message)
        self.is_over = True
        delta = {"type": "message_delta", "delta": stop, "usage": usage_fields(draft.usage), **edits_field(self._body)}
        return [*self._start(), *self._close(), delta, {"type": "message_stop"}]

    def fail(self, status: int, body: object) -> list[Fields]:
        """The events when the engine fails after the first byte went out."""
        self.is_over = True
        return [*self._start(), *self._close(), error(status, body)[1]]

    def _start(self) -> list[Fields]:
        if self._started:
            return []
        self._started = True
        usage = {**usage_fields(self._draft.usage), "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        model = self._draft.model or str(self._body["model"])
        return [{"type": "message_start", "message": message(model, [], stop, usage)}]

    def _thinking(self, text: str | None) -> list[Fields]:
        if not text:
            return []
        opening = [] if self._open == "thinking" else self._begin("thinking", thinking_block(""))
        return [*opening, self._delta({"type": "thinking_delta", "thinking": text})]

    def _text(self, text: str | None) -> list[Fields]:
        """Blanks after a call wait for a text: engines send them between the calls of one answer."""
        text = self._blanks + (text or "")
        self._blanks = ""
        if self._open == "tool_use" and not text.strip():
            self._blanks = text
            return []
        if not text:
            return []
        opening = [] if self._open == "text" else self._begin("text", text_block(""))
        return [*opening, self._delta({"type": "text_delta", "text": text})]

    def _fits(self, call: Mapping[str, Any]) -> bool:
        """Whether a part of a call begins one or belongs to the one that is open."""
        is_open = self._open == "tool_use" and (call.get("index") or 0) == self._open_call
        return is_open or bool((call.get("function") or {}).get("name"))

    def _call(self, call: Mapping[str, Any]) -> list[Fields]:
        function, index = call.get("function") or {}, call.get("index") or 0
        opening: list[Fields] = []
        if self._open != "tool_use" or index != self._open_call:
            self._open_call = index
            opening = self._begin("tool_use", tool_use_block(call.get("id") or "", function.get("name") or "", {}))
        if not function.get("arguments"):
            return opening
        return [*opening, self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})]

    def _begin(self, kind: str, block: Fields) -> list[Fields]:
        closing = self._close()
        self._open = kind
        self._index += 1
        return [*closing, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Fields]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]
