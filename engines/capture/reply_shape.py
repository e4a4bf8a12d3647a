"""Types of chat replies, for the fields that are used here.

An engine is a separate process that may send anything, so replies are validated against these types before use.
Fields may be missing or null, and fields not listed here may have any value.
"""

import math
from typing import Annotated, Any

import msgspec

from forebay.core.errors import EngineError
from forebay.engines.read_json import UNREADABLE, read_json, read_object, unreadable

Json = dict[str, Any]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Ids = list[TokenId]

CHAT, CHUNK, GENERATED = "chat completion", "chunk of a chat completion", "completion of /generate"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    index: Count | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprob(msgspec.Struct):
    token: str | None = None
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str | int | None
    start: Count
    end: Count

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError("a span of a weight version ends before it starts")


class _Metadata(msgspec.Struct):
    """SGLang's ``metadata`` of a chat, and the ``meta_info`` of a choice."""

    weight_versions: list[_Span] | None = None
    num_retractions: Count | None = None
    output_token_logprobs: list[tuple[float | None, TokenId | None, Any]] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None


class _Choice(msgspec.Struct):
    message: _Message
    index: Count | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    meta_info: _Metadata | None = None
    prompt_token_ids: Ids | None = None
    response_token_ids: Ids | None = None
    token_ids: Ids | None = None
    weight_versions: list[_Span] | None = None


class _Chat(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    id: str | None = None
    model: str | None = None
    usage: _Usage | None = None
    metadata: _Metadata | None = None
    prompt_token_ids: Ids | None = None


class _ChunkChoice(msgspec.Struct):
    index: Count | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: Ids | None = None
    weight_versions: list[_Span] | None = None


class _SGLangEnd(msgspec.Struct):
    input_ids: Ids | None = None
    output_ids: list[Ids | None] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] | None = None
    id: str | None = None
    model: str | None = None
    usage: _Usage | None = None
    sglext: _SGLangEnd | None = None
    prompt_token_ids: Ids | None = None


class _GeneratedInfo(msgspec.Struct):
    output_token_logprobs: list[tuple[float | None, TokenId, Any]]
    weight_versions: list[_Span] | None = None
    num_retractions: Count | None = None
    finish_reason: Json | None = None


class _Generated(msgspec.Struct):
    text: str
    output_ids: Ids
    meta_info: _GeneratedInfo


_chat = msgspec.json.Decoder(_Chat)
_chunk = msgspec.json.Decoder(_Chunk)
_generated = msgspec.json.Decoder(_Generated | Annotated[list[_Generated], msgspec.Meta(min_length=1)])
_any = msgspec.json.Decoder()


def read_chat(content: bytes) -> Json:
    """Decode a whole chat completion. Raises ``EngineError`` for anything else."""
    read_json(content, _chat, CHAT)
    reply = read_object(content, CHAT)
    for choice in reply["choices"]:
        name_reasoning(choice["message"])
    return reply


def read_chunk(content: bytes) -> Json:
    """Decode one chunk of a stream, or an object with an ``error``. Raises ``EngineError`` for anything else."""
    chunk = read_object(content, CHUNK)
    if not chunk.get("error"):
        read_json(content, _chunk, CHUNK)
        _name_reasoning_in(chunk)
    return chunk


def name_reasoning(message: Json) -> None:
    """Copy vLLM's ``reasoning`` in a message or delta to SGLang's name ``reasoning_content``."""
    thought = message.get("reasoning")
    if isinstance(thought, str) and thought and not message.get("reasoning_content"):
        message["reasoning_content"] = thought


def _name_reasoning_in(chunk: Json) -> None:
    for choice in chunk.get("choices") or ():
        name_reasoning(choice.get("delta") or {})


def check_chunk(fields: Json) -> None:
    """Validate a chunk as ``read_chunk`` does, after a lenient decoder that accepts NaN and lone surrogates."""
    try:
        for choice in msgspec.convert(fields, _Chunk).choices or ():
            known = choice.logprobs.content or () if choice.logprobs is not None else ()
            if not all(math.isfinite(each.logprob) for each in known if each.logprob is not None):
                raise ValueError("a logprob must be a finite number")
        msgspec.json.encode(fields)  # raises for a lone surrogate, which cannot be sent to a client
    except UNREADABLE as error:
        raise unreadable(fields, CHUNK, error) from error
    _name_reasoning_in(fields)


def read_generated(content: bytes) -> list[Json]:
    """Decode the replies of ``/generate``: one, or a list if several were requested. Raises ``EngineError``."""
    read_json(content, _generated, GENERATED)
    replies = read_json(content, _any, GENERATED)
    return replies if isinstance(replies, list) else [replies]


def check_has_choice(is_begun: bool) -> None:
    """Check a finished stream: raises ``EngineError`` unless it contained a choice."""
    if not is_begun:
        raise EngineError("the engine's stream ended without any choice", status_code=200)
