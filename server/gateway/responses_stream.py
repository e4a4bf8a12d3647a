"""A streamed chat as the events of a streamed response."""

import time
from collections.abc import Mapping
from typing import Any

from forebay.server.gateway.protocol_chat import Fields, ReplyMemo, error_status, told_error
from forebay.server.gateway.protocol_draft import ReplyDraft
from forebay.server.gateway.responses_output import new_id
from forebay.server.gateway.responses_parts import OpenCall, OpenCustomCall, OpenItem, OpenMessage, OpenReasoning
from forebay.server.gateway.responses_reply import ended, response, status_of
from forebay.server.gateway.responses_request import parsed
from forebay.server.gateway.responses_store import ResponseStore
from forebay.server.gateway.responses_tools import custom_names


class EventStream:
    """Give it each chunk, then ``end``; ``event_bytes`` writes what it returns.

    ``body`` is the Responses request. After an error nothing more comes, and ``is_over`` is true.
    """

    def __init__(
        self, body: Mapping[str, Any], store: ResponseStore | None = None, memo: ReplyMemo | None = None
    ) -> None:
        self.is_over = False
        self._request, _ = parsed(body)
        self._store = store
        self._memo = memo
        self._draft = ReplyDraft()
        self._id = new_id("resp")
        self._created_at = int(time.time())
        self._count = 0
        self._output: list[Fields] = []
        self._open: OpenItem | None = None
        self._open_call: int | None = None
        self._blanks = ""

    def feed(self, chunk: Mapping[str, Any]) -> list[Fields]:
        """The events for one chunk of the chat."""
        if self.is_over:
            return []
        if chunk.get("error"):
            return self.fail(error_status(chunk), chunk)
        delta = self._draft.add(chunk)
        events = self._start() + self._thinking(delta.get("reasoning_content")) + self._text(delta.get("content"))
        for call in delta.get("tool_calls") or []:
            if not self._fits(call):
                return events + self.fail(502, "the engine sent arguments of a call that had ended")
            events += self._call(call)
        return events

    def end(self) -> list[Fields]:
        """The events after the last chunk. A stream without a finish reason was cut, which is a failure."""
        if self.is_over:
            return []
        self.is_over = True
        status = status_of(self._draft.finish_reason)
        events = self._start()
        if self._open is None and not self._output:
            events += self._begin(OpenMessage("final_answer"))
        events += self._close("completed" if status == "completed" else "incomplete")
        told = ended(self._response(status), self._draft.finish_reason, self._draft.usage)
        if self._memo and status != "failed":
            self._memo.remember(self._draft.message)
        self._keep(told)
        return [*events, self._event({"type": f"response.{status}", "response": told})]

    def fail(self, status: int, body: object) -> list[Fields]:
        """The events when the engine fails after the first byte went out. ``status`` has no place in them."""
        self.is_over = True
        events = self._start() + self._close("incomplete")
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        told = {**self._response("failed"), "error": {"code": code, "message": told_error(body)}}
        self._keep(told)
        return [*events, self._event({"type": "response.failed", "response": told})]

    def _keep(self, told: Fields) -> None:
        if self._store and self._request.store is not False:
            self._store.add(told, self._request.input_items)

    def _response(self, status: str) -> Fields:
        return response(
            self._request,
            self._id,
            model=self._draft.model or self._request.model,
            output=list(self._output),
            created_at=self._created_at,
            status=status,
        )

    def _start(self) -> list[Fields]:
        if self._count:
            return []
        kinds = ("response.created", "response.in_progress")
        return [self._event({"type": kind, "response": self._response("in_progress")}) for kind in kinds]

    def _thinking(self, text: str | None) -> list[Fields]:
        if not text:
            return []
        opening = [] if isinstance(self._open, OpenReasoning) else self._begin(OpenReasoning(self._request))
        return opening + self._more(text)

    def _text(self, text: str | None) -> list[Fields]:
        """Blanks after a call wait for a text: engines send them between the calls of one answer."""
        text = self._blanks + (text or "")
        self._blanks = ""
        if isinstance(self._open, OpenCall) and not text.strip():
            self._blanks = text
            return []
        if not text:
            return []
        phase = None if self._request.tools else "final_answer"
        opening = [] if isinstance(self._open, OpenMessage) else self._begin(OpenMessage(phase))
        return opening + self._more(text)

    def _fits(self, call: Mapping[str, Any]) -> bool:
        """Whether a part of a call begins one or belongs to the one that is open."""
        is_open = isinstance(self._open, OpenCall) and (call.get("index") or 0) == self._open_call
        return is_open or bool((call.get("function") or {}).get("name"))

    def _call(self, call: Mapping[str, Any]) -> list[Fields]:
        function, index = call.get("function") or {}, call.get("index") or 0
        opening: list[Fields] = []
        if not isinstance(self._open, OpenCall) or index != self._open_call:
            self._open_call = index
            kind = OpenCustomCall if function["name"] in custom_names(self._request) else OpenCall
            if isinstance(self._open, OpenMessage):
                self._open.phase = "commentary"
            opening = self._begin(kind(call.get("id") or new_id("call"), function["name"]))
        return opening + self._more(function.get("arguments") or "")

    def _begin(self, item: OpenItem) -> list[Fields]:
        closing = self._close("completed")
        self._open = item
        return closing + self._events(item.opening())

    def _more(self, text: str) -> list[Fields]:
        assert self._open is not None
        return self._events(self._open.more(text))

    def _close(self, status: str) -> list[Fields]:
        item = self._open
        if item is None:
            return []
        if isinstance(item, OpenMessage):
            item.phase = item.phase or "final_answer"
        events = self._events(item.closing(status))
        self._output.append(item.item(status))
        self._open = None
        return events

    def _events(self, events: list[Fields]) -> list[Fields]:
        assert self._open is not None
        return [self._event({**event, **self._place(event)}) for event in events]

    def _place(self, event: Fields) -> Fields:
        assert self._open is not None
        index: Fields = {"output_index": len(self._output)}
        return index if "item" in event else {**index, "item_id": self._open.id}

    def _event(self, event: Fields) -> Fields:
        self._count += 1
        return {**event, "sequence_number": self._count - 1}
