"""The protocols of agents, one class each: translates a call to a chat, and the answer back to the protocol."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.anthropic import from_chat as messages_reply
from forebay.gateway.dialects.anthropic import to_chat as messages_request
from forebay.gateway.dialects.anthropic.stream import MessagesStream
from forebay.gateway.dialects.chunks import AnswerStream
from forebay.gateway.dialects.errors import ProtocolRefused, messages_error, responses_error
from forebay.gateway.dialects.history import ReplyMemo
from forebay.gateway.dialects.responses import from_chat as responses_reply
from forebay.gateway.dialects.responses import to_chat as responses_request
from forebay.gateway.dialects.responses.request import ResponsesRequest, parsed
from forebay.gateway.dialects.responses.store import ResponseStore
from forebay.gateway.dialects.responses.stream import ResponsesStream
from forebay.gateway.dialects.unknown import UnknownFieldLog
from forebay.gateway.engine_http import DONE
from forebay.gateway.engine_http import event as chat_event

Json = dict[str, Any]


class CrossCallState:
    """State shared by the calls of one rollout."""

    def __init__(self) -> None:
        self.memo = ReplyMemo()
        self.store = ResponseStore()


class Dialect(ABC):
    """One call in a protocol. Its methods raise ``ProtocolRefused``."""

    name = ""
    is_engines_own = False
    """Whether engines speak this protocol, so that their errors and headers are forwarded unchanged."""
    after_stream = b""
    """Bytes after the last event of a stream."""

    def __init__(self, memory: CrossCallState) -> None:
        self.memory = memory
        self.unknown = UnknownFieldLog(self.name)
        """Features of the call that were left out of the chat, or passed on unchecked."""

    @abstractmethod
    def to_chat(self, body: Json) -> Json:
        """Return the chat completion to request."""

    @abstractmethod
    def reply(self, chat: Json) -> Json:
        """Translate a whole chat completion to this protocol."""

    @abstractmethod
    def stream(self) -> AnswerStream:
        """Return a translator for a streamed answer."""

    @classmethod
    @abstractmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        """Return an error of the engine or the gateway in this protocol."""

    @classmethod
    def refusal(cls, refused: ProtocolRefused) -> tuple[int, Json]:
        """Return an error of the translation."""
        status, body = cls.error(refused.status, str(refused))
        body["error"] |= refused.fields
        return status, body

    @staticmethod
    def event_bytes(event: Json) -> bytes:
        """Encode one event of a stream, named by its ``type``."""
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return f"event: {event['type']}\ndata: {data}\n\n".encode()


class ChatStream(AnswerStream):
    """Chunks without translation."""

    def feed(self, chunk: Json) -> list[Json]:
        return [chunk]

    def end(self) -> list[Json]:
        return []

    def fail(self, status: int, body: object) -> list[Json]:
        return [ChatDialect.error(status, body)[1]]


class ChatDialect(Dialect):
    """Chat completions, which need no translation."""

    is_engines_own = True
    after_stream = DONE

    @staticmethod
    def event_bytes(event: Json) -> bytes:
        return chat_event(event)

    def to_chat(self, body: Json) -> Json:
        return body

    def reply(self, chat: Json) -> Json:
        return chat

    def stream(self) -> AnswerStream:
        return ChatStream()

    @classmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        return status, dict(body) if isinstance(body, Mapping) else {"message": str(body)}


class MessagesDialect(Dialect):
    """Anthropic's Messages protocol."""

    name = "messages"
    body: Json
    """The request, without its messages."""

    def to_chat(self, body: Json) -> Json:
        self.body = {name: value for name, value in body.items() if name != "messages"}
        return messages_request.to_chat(body, self.memory.memo, self.unknown)

    def reply(self, chat: Json) -> Json:
        return messages_reply.from_chat(chat, self.body, self.memory.memo)

    def stream(self) -> AnswerStream:
        return MessagesStream(self.body, self.memory.memo)

    @classmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        return messages_error(status, body)


class ResponsesDialect(Dialect):
    """OpenAI's Responses protocol."""

    name = "responses"
    request: ResponsesRequest

    def to_chat(self, body: Json) -> Json:
        self.request, engine_fields = parsed(body, self.unknown)
        store, memo = self.memory.store, self.memory.memo
        return responses_request.to_chat(self.request, engine_fields, store, memo, self.unknown)

    def reply(self, chat: Json) -> Json:
        return responses_reply.from_chat(chat, self.request, self.memory.store, self.memory.memo)

    def stream(self) -> AnswerStream:
        return ResponsesStream(self.request, self.memory.store, self.memory.memo)

    @classmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        return responses_error(status, body)
