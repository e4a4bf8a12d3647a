"""A streamed chat as the events of a streamed response."""

import time
from collections.abc import Mapping
from typing import Any

from forebay.server.gateway.protocol_chat import Fields, ReplyMemo, told_error
from forebay.server.gateway.protocol_stream import ProtocolStream
from forebay.server.gateway.responses_output import new_id
from forebay.server.gateway.responses_parts import OpenCall, OpenCustomCall, OpenItem, OpenMessage, OpenReasoning
from forebay.server.gateway.responses_reply import ended, response, status_of
from forebay.server.gateway.responses_request import parsed
from forebay.server.gateway.responses_store import ResponseStore
from forebay.server.gateway.responses_tools import custom_names


class EventStream(ProtocolStream):
    """``body`` is the Responses request."""

    def __init__(
        self, body: Mapping[str, Any], store: ResponseStore | None = None, memo: ReplyMemo | None = None
    ) -> None:
        super().__init__(memo)
        self._request, _ = parsed(body)
        self._store = store
        self._id = new_id("resp")
        self._created_at = int(time.time())
        self._count = 0
        self._output: list[Fields] = []
        self._open: OpenItem | None = None

    @property
    def _is_call_open(self) -> bool:
        return isinstance(self._open, OpenCall)

    def end(self) -> list[Fields]:
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
        """``status`` has no place in the events."""
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

    def _opening(self, _: Mapping[str, Any]) -> list[Fields]:
        return self._start()

    def _start(self) -> list[Fields]:
        if self._count:
            return []
        kinds = ("response.created", "response.in_progress")
        return [self._event({"type": kind, "response": self._response("in_progress")}) for kind in kinds]

    def _thinking(self, text: str) -> list[Fields]:
        opening = [] if isinstance(self._open, OpenReasoning) else self._begin(OpenReasoning(self._request))
        return opening + self._more(text)

    def _text(self, text: str) -> list[Fields]:
        phase = None if self._request.tools else "final_answer"
        opening = [] if isinstance(self._open, OpenMessage) else self._begin(OpenMessage(phase))
        return opening + self._more(text)

    def _call(self, call_id: str, function: Mapping[str, Any], *, is_begun: bool) -> list[Fields]:
        opening: list[Fields] = []
        if is_begun:
            kind = OpenCustomCall if function["name"] in custom_names(self._request) else OpenCall
            if isinstance(self._open, OpenMessage):
                self._open.phase = "commentary"
            opening = self._begin(kind(call_id or new_id("call"), function["name"]))
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
