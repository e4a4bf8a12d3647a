"""One class for each protocol that agents speak: a call as a chat, and the engine's answer in the protocol's words."""

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
    """What the calls of one rollout remember of each other."""

    def __init__(self) -> None:
        self.memo = ReplyMemo()
        self.store = ResponseStore()


class Dialect(ABC):
    """One call in some protocol. Its methods raise ``ProtocolRefused``."""

    name = ""
    is_engines_own = False
    """Whether engines speak it: then their errors and headers are passed on as they are."""
    after_stream = b""
    """What ends a stream, after its last event."""

    def __init__(self, memory: CrossCallState) -> None:
        self.memory = memory
        self.unknown = UnknownFieldLog(self.name)
        """What of the call was left out of the chat, or passed on unread."""

    @abstractmethod
    def to_chat(self, body: Json) -> Json:
        """The chat completion to ask for."""

    @abstractmethod
    def reply(self, chat: Json) -> Json:
        """A whole chat completion in this protocol."""

    @abstractmethod
    def stream(self) -> AnswerStream:
        """For an answer as it comes."""

    @classmethod
    @abstractmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        """An error of the engine, or of the gateway."""

    @classmethod
    def refusal(cls, refused: ProtocolRefused) -> tuple[int, Json]:
        """An error of the translation."""
        status, body = cls.error(refused.status, str(refused))
        body["error"] |= refused.fields
        return status, body

    @staticmethod
    def event_bytes(event: Json) -> bytes:
        """One event of a stream as it goes out: its name is its ``type``."""
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return f"event: {event['type']}\ndata: {data}\n\n".encode()


class ChatStream(AnswerStream):
    """Chunks as they are."""

    def feed(self, chunk: Json) -> list[Json]:
        return [chunk]

    def end(self) -> list[Json]:
        return []

    def fail(self, status: int, body: object) -> list[Json]:
        return [ChatDialect.error(status, body)[1]]


class ChatDialect(Dialect):
    """Chat completions: nothing is translated."""

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
    """Anthropic's Messages."""

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
    """OpenAI's Responses."""

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
