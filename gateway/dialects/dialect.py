"""One class for each protocol that agents speak: a call as a chat, and the engine's answer in the protocol's words."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects import anthropic, responses
from forebay.gateway.dialects.chunks import ProtocolStream, event_bytes
from forebay.gateway.dialects.history import ReplyMemo
from forebay.gateway.dialects.responses import ResponseStore
from forebay.gateway.engine_http import DONE, event
from forebay.gateway.refusals import GatewayRefusal

Json = dict[str, Any]


class Memory:
    """What the calls of one rollout remember of each other."""

    def __init__(self) -> None:
        self.memo = ReplyMemo()
        self.store = ResponseStore()


class Stream(ABC):
    """What an agent gets of one answer as it comes, in encoded events."""

    @abstractmethod
    def feed(self, chunk: Json) -> bytes:
        """Chunk by chunk of a chat completion."""

    @abstractmethod
    def end(self) -> bytes:
        """What comes after the last chunk."""

    @abstractmethod
    def fail(self, refusal: GatewayRefusal) -> bytes:
        """In place of the rest."""


class Dialect(ABC):
    """One call in some protocol. Its methods raise ``ProtocolRefused``."""

    is_engines_own = False
    """Whether engines speak it: then their errors and headers are passed on as they are."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.body: Json = {}
        self.notes: list[str] = []
        """What of the call was left out of the chat, or passed on unread: names of kinds."""

    @abstractmethod
    def to_chat(self, body: Json) -> Json:
        """The chat completion to ask for."""

    @abstractmethod
    def reply(self, chat: Json) -> Json:
        """A whole chat completion in this protocol."""

    @abstractmethod
    def stream(self) -> Stream:
        """For an answer as it comes."""

    @classmethod
    @abstractmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        """An error of the engine, or of the gateway."""


class ChatStream(Stream):
    """Chunks as they are."""

    def feed(self, chunk: Json) -> bytes:
        return event(chunk)

    def end(self) -> bytes:
        return DONE

    def fail(self, refusal: GatewayRefusal) -> bytes:
        return event(refusal.body()) + DONE


class ChatDialect(Dialect):
    """Chat completions: nothing is translated."""

    is_engines_own = True

    def to_chat(self, body: Json) -> Json:
        return body

    def reply(self, chat: Json) -> Json:
        return chat

    def stream(self) -> Stream:
        return ChatStream()

    @classmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        return status, dict(body) if isinstance(body, Mapping) else {"message": str(body)}


class TranslatedStream(Stream):
    """Events of another protocol."""

    def __init__(self, events: ProtocolStream) -> None:
        self._events = events

    def feed(self, chunk: Json) -> bytes:
        return b"".join(map(event_bytes, self._events.feed(chunk)))

    def end(self) -> bytes:
        return b"".join(map(event_bytes, self._events.end()))

    def fail(self, refusal: GatewayRefusal) -> bytes:
        return b"".join(map(event_bytes, self._events.fail(refusal.status, refusal.body())))


class MessagesDialect(Dialect):
    """Anthropic's Messages."""

    def to_chat(self, body: Json) -> Json:
        self.body = {name: value for name, value in body.items() if name != "messages"}
        return anthropic.to_chat(body, self.memory.memo, self.notes)

    def reply(self, chat: Json) -> Json:
        return anthropic.from_chat(chat, self.body, self.memory.memo)

    def stream(self) -> Stream:
        return TranslatedStream(anthropic.MessagesStream(self.body, self.memory.memo))

    @classmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        return anthropic.messages_error(status, body)


class ResponsesDialect(Dialect):
    """OpenAI's Responses."""

    def to_chat(self, body: Json) -> Json:
        self.body = body
        return responses.to_chat(body, self.memory.store, self.memory.memo, self.notes)

    def reply(self, chat: Json) -> Json:
        return responses.from_chat(chat, self.body, self.memory.store, self.memory.memo)

    def stream(self) -> Stream:
        return TranslatedStream(responses.ResponsesStream(self.body, self.memory.store, self.memory.memo))

    @classmethod
    def error(cls, status: int, body: object) -> tuple[int, Json]:
        return responses.responses_error(status, body)
