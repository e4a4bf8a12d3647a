"""Translate a streamed chat to the events of a streamed Messages reply."""

from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.anthropic.from_chat import (
    SIGNATURE,
    edits_field,
    message,
    stop_fields,
    text_block,
    thinking_block,
    tool_use_block,
    usage_fields,
)
from forebay.gateway.dialects.chunks import TranslatedStream
from forebay.gateway.dialects.errors import ProtocolRefused, messages_error
from forebay.gateway.dialects.history import Fields, ReplyMemo

CONTENTS = ("reasoning_content", "content", "tool_calls")
"""Content fields of a delta."""


class MessagesStream(TranslatedStream):
    """Translates one stream; ``body`` is the Messages request."""

    def __init__(self, body: Mapping[str, Any], memo: ReplyMemo) -> None:
        super().__init__(memo)
        self._body = body
        self._started = False
        self._index = -1
        self._open = ""

    @property
    def _is_call_open(self) -> bool:
        return self._open == "tool_use"

    def end(self) -> list[Fields]:
        if self.is_over:
            return []
        draft = self._draft
        try:
            stop = stop_fields(draft.finish_reason or "", draft.matched_stop, self._body.get("stop_sequences"))
        except ProtocolRefused as refused:
            return self.fail(refused.status, str(refused))
        self._memo.remember(draft.message)
        self.is_over = True
        delta = {"type": "message_delta", "delta": stop, "usage": usage_fields(draft.usage), **edits_field(self._body)}
        return [*self._start(), *self._close(), delta, {"type": "message_stop"}]

    def fail(self, status: int, body: object) -> list[Fields]:
        self.is_over = True
        # Open blocks are closed first: clients that collect blocks rely on it.
        return [*self._start(), *self._close(), messages_error(status, body)[1]]

    def _opening(self, delta: Mapping[str, Any]) -> list[Fields]:
        # An engine's first chunk may have only a role and no counts, but the start event needs the prompt's count.
        is_begun = self._draft.finish_reason or any(delta.get(name) for name in CONTENTS)
        return self._start() if is_begun else []

    def _start(self) -> list[Fields]:
        if self._started:
            return []
        self._started = True
        # Always 0 at the start, whatever the first chunk with counts says; the last event has the number.
        usage = {**usage_fields(self._draft.usage), "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        model = self._draft.model or str(self._body["model"])
        return [{"type": "message_start", "message": message(model, [], stop, usage)}]

    def _thinking(self, text: str) -> list[Fields]:
        opening = [] if self._open == "thinking" else self._begin("thinking", thinking_block("", ""))
        return [*opening, self._delta({"type": "thinking_delta", "thinking": text})]

    def _text(self, text: str) -> list[Fields]:
        opening = [] if self._open == "text" else self._begin("text", text_block(""))
        return [*opening, self._delta({"type": "text_delta", "text": text})]

    def _call(self, call_id: str, function: Mapping[str, Any], *, is_begun: bool) -> list[Fields]:
        opening = self._begin("tool_use", tool_use_block(call_id, function["name"], {})) if is_begun else []
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
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] if self._open == "thinking" else []
        self._open = ""
        return [*signed, {"type": "content_block_stop", "index": self._index}]
