"""Translate a streamed chat to the events of a streamed response.

``OpenItem`` and its subclasses produce the events of an output item in the protocol's order. The stream opens and
closes items, and adds ``sequence_number``, ``output_index`` and ``item_id`` to each event.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.chunks import TranslatedStream
from forebay.gateway.dialects.errors import engine_message
from forebay.gateway.dialects.history import Fields, ReplyMemo
from forebay.gateway.dialects.responses.from_chat import (
    call_item,
    custom_call_item,
    ended,
    message_item,
    new_id,
    reasoning_item,
    response_object,
    status_of,
    text_part,
)
from forebay.gateway.dialects.responses.request import ResponsesRequest
from forebay.gateway.dialects.responses.store import ResponseStore
from forebay.gateway.dialects.responses.tools import OfferedTools, custom_input


class OpenItem(ABC):
    """One output item that is being streamed."""

    prefix: str

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self.text = ""

    def opening(self) -> list[Fields]:
        """Return the events that begin the item."""
        return [{"type": "response.output_item.added", "item": self.item("in_progress")}]

    def more(self, text: str) -> list[Fields]:
        """Return the events for more of its text."""
        self.text += text
        return [self._delta(text)] if text else []

    def closing(self, status: str) -> list[Fields]:
        """Return the events that end the item."""
        return [*self._done(), {"type": "response.output_item.done", "item": self.item(status)}]

    @abstractmethod
    def item(self, status: str) -> Fields:
        """Return the item in its current state."""

    @abstractmethod
    def _delta(self, text: str) -> Fields: ...

    @abstractmethod
    def _done(self) -> list[Fields]: ...


class OpenMessage(OpenItem):
    """A message. If tools are offered, its phase is known only at its end."""

    prefix = "msg"

    def __init__(self, phase: str | None) -> None:
        super().__init__()
        self.phase = phase

    def opening(self) -> list[Fields]:
        part = {"type": "response.content_part.added", "content_index": 0, "part": text_part("")}
        return [*super().opening(), part]

    def item(self, status: str) -> Fields:
        begun = status == "in_progress"
        return message_item(self.id, [] if begun else [text_part(self.text)], self.phase, status)

    def _delta(self, text: str) -> Fields:
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": []}

    def _done(self) -> list[Fields]:
        return [
            {"type": "response.output_text.done", "content_index": 0, "text": self.text, "logprobs": []},
            {"type": "response.content_part.done", "content_index": 0, "part": text_part(self.text)},
        ]


class OpenReasoning(OpenItem):
    """Reasoning: as a summary if the client wants one, otherwise as reasoning text."""

    prefix = "rs"

    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__()
        self._request = request
        summary = request.wants_summary
        self._name = "response.reasoning_summary_text" if summary else "response.reasoning_text"
        self._part = "response.reasoning_summary_part" if summary else "response.content_part"
        self._kind = "summary_text" if summary else "reasoning_text"
        self._at = {"summary_index" if summary else "content_index": 0}

    def opening(self) -> list[Fields]:
        return [*super().opening(), self._part_event("added", "")]

    def item(self, status: str) -> Fields:
        return reasoning_item(self.id, self.text, self._request, status)

    def _delta(self, text: str) -> Fields:
        return {"type": f"{self._name}.delta", **self._at, "delta": text}

    def _done(self) -> list[Fields]:
        return [{"type": f"{self._name}.done", **self._at, "text": self.text}, self._part_event("done", self.text)]

    def _part_event(self, what: str, text: str) -> Fields:
        return {"type": f"{self._part}.{what}", **self._at, "part": {"type": self._kind, "text": text}}


class OpenCall(OpenItem):
    """A function call; its text is the arguments."""

    prefix = "fc"

    def __init__(self, call_id: str, names: Fields) -> None:
        super().__init__()
        self._call_id = call_id
        self._names = names

    def item(self, status: str) -> Fields:
        return call_item(self.id, self._call_id, self._names, self.text, status)

    def _delta(self, text: str) -> Fields:
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def _done(self) -> list[Fields]:
        return [{"type": "response.function_call_arguments.done", "name": self._names["name"], "arguments": self.text}]


class OpenCustomCall(OpenCall):
    """A custom tool call; its text is JSON arguments that contain the input."""

    prefix = "ctc"

    def more(self, text: str) -> list[Fields]:
        self.text += text
        return []

    def item(self, status: str) -> Fields:
        return custom_call_item(self.id, self._call_id, self._names, self._input, status)

    # Escaped JSON cannot be decoded in part: the input is sent in one piece once complete.
    @property
    def _input(self) -> str:
        return custom_input(self.text) if self.text else ""

    def _done(self) -> list[Fields]:
        delta = {"type": "response.custom_tool_call_input.delta", "delta": self._input}
        return [delta, {"type": "response.custom_tool_call_input.done", "input": self._input}]


class ResponsesStream(TranslatedStream):
    """Translates the answer to a Responses request."""

    def __init__(self, request: ResponsesRequest, store: ResponseStore, memo: ReplyMemo) -> None:
        super().__init__(memo)
        self._request = request
        self._tools = OfferedTools(self._request.tools)
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
        # An empty answer becomes an empty message, as in a whole reply.
        if self._open is None and not self._output:
            events += self._begin(OpenMessage("final_answer"))
        events += self._close("completed" if status == "completed" else "incomplete")
        response = ended(self._response(status), self._draft.finish_reason, self._draft.usage)
        if status != "failed":
            self._memo.remember(self._draft.message)
        return [*events, self._last_event(f"response.{status}", response)]

    def fail(self, status: int, body: object) -> list[Fields]:
        self.is_over = True
        events = self._start() + self._close("incomplete")
        # Events have no status; only the code of a rate limit is kept, because clients back off and retry on it.
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        response = {**self._response("failed"), "error": {"code": code, "message": engine_message(body)}}
        return [*events, self._last_event("response.failed", response)]

    def _last_event(self, kind: str, response: Fields) -> Fields:
        if self._request.store is not False:
            self._store.add(response, self._request.input_items)
        return self._event({"type": kind, "response": response})

    def _response(self, status: str) -> Fields:
        return response_object(
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
            kind = OpenCustomCall if self._tools.is_custom(function["name"]) else OpenCall
            # Text before a call is not the final answer; user interfaces of agents show them differently.
            if isinstance(self._open, OpenMessage):
                self._open.phase = "commentary"
            opening = self._begin(kind(call_id or new_id("call"), self._tools.name_fields(function["name"])))
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
