"""The output items of a streamed answer while they are open: each knows its events, in the protocol's order.

An event is given without ``sequence_number``, ``output_index`` and ``item_id``, which the stream adds.
"""

from abc import ABC, abstractmethod

from forebay.server.gateway.protocol_chat import Fields
from forebay.server.gateway.responses_output import (
    call_item,
    custom_call_item,
    message_item,
    new_id,
    reasoning_item,
    text_part,
)
from forebay.server.gateway.responses_request import ResponsesRequest
from forebay.server.gateway.responses_tools import custom_input


class OpenItem(ABC):
    """One output item, being written."""

    prefix: str

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self.text = ""

    def opening(self) -> list[Fields]:
        """The events that begin it."""
        return [{"type": "response.output_item.added", "item": self.item("in_progress")}]

    def more(self, text: str) -> list[Fields]:
        """The events for more of its text."""
        self.text += text
        return [self._delta(text)] if text else []

    def closing(self, status: str) -> list[Fields]:
        """The events that end it."""
        return [*self._done(), {"type": "response.output_item.done", "item": self.item(status)}]

    @abstractmethod
    def item(self, status: str) -> Fields:
        """The item as it is now."""

    @abstractmethod
    def _delta(self, text: str) -> Fields: ...

    @abstractmethod
    def _done(self) -> list[Fields]: ...


class OpenMessage(OpenItem):
    """Text. Its phase is known at its end, where calls are offered."""

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
    """Reasoning: told as a summary where the client wants one, else as it is."""

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
    """A call of a function; its text are the arguments."""

    prefix = "fc"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id = call_id
        self._name = name

    def item(self, status: str) -> Fields:
        return call_item(self.id, self._call_id, self._name, self.text, status)

    def _delta(self, text: str) -> Fields:
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def _done(self) -> list[Fields]:
        return [{"type": "response.function_call_arguments.done", "name": self._name, "arguments": self.text}]


class OpenCustomCall(OpenCall):
    """A call of a custom tool. Its input stands in the arguments as JSON, so that it is known at the end only."""

    prefix = "ctc"

    def more(self, text: str) -> list[Fields]:
        self.text += text
        return []

    def item(self, status: str) -> Fields:
        return custom_call_item(self.id, self._call_id, self._name, self._input, status)

    @property
    def _input(self) -> str:
        return custom_input(self.text) if self.text else ""

    def _done(self) -> list[Fields]:
        delta = {"type": "response.custom_tool_call_input.delta", "delta": self._input}
        return [delta, {"type": "response.custom_tool_call_input.done", "input": self._input}]
