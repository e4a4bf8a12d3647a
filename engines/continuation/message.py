"""Read one assistant message from the tokens of a turn that aborts cut into parts.

An engine parses each part separately, so it misses a character, a stop string or a tool call that lies across a cut.
The correct message is read from all tokens at once.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from forebay.core.errors import EngineError
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_template import TextOf
from forebay.engines.read_json import UNREADABLE, unreadable
from forebay.engines.router_workers import WorkerAdmin

logger = logging.getLogger(__name__)

ENDED = frozenset({"stop", "tool_calls"})
"""Finish reasons of a turn whose last token ended it and is not part of the text."""


@dataclass(frozen=True)
class Whole:
    """A message read from all its tokens, of which the first ``num_tokens`` count."""

    message: dict[str, Any]
    finish_reason: str
    num_tokens: int


class _ParsedCall(msgspec.Struct):
    name: str | None = None
    parameters: str | None = None


class _Parsed(msgspec.Struct):
    """Replies of SGLang's reasoning and tool call parsers."""

    text: str | None = None
    reasoning_text: str | None = None
    normal_text: str | None = None
    calls: list[_ParsedCall] | None = None


class MessageReading(ABC):
    """Reads the message of a turn with token ids; subclasses decode and parse them.

    ``body`` is the chat request, with its ``stop`` and ``tools``. A stop string across a cut, which the engine missed,
    ends the turn there.
    """

    def __init__(self, turn: Turn, body: Mapping[str, Any]) -> None:
        self._turn = turn
        self._ids = list(turn.sampled_ids or ())
        self._body = body
        stop = body.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else [text for text in stop if text]
        self._has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        # The engine's own replies to a chat with tools keep special tokens, for its parsers.
        self._skips_special = bool(body.get("skip_special_tokens", True)) and not self._has_tools

    async def message(self) -> Whole | None:
        """Return the message; None if the engine cannot decode tokens."""
        try:
            return await self._whole(self._turn.finish_reason)
        except (EngineError, TimeoutError) as error:
            logger.warning("the parts of an aborted turn are concatenated without parsing: %s", type(error).__name__)
            return None

    async def _whole(self, finish_reason: str) -> Whole | None:
        texts = await self._texts(len(self._ids), max(len(self._ids) - 1, 0))
        if texts is None:
            return None
        text, without_last = texts
        end = self._stop_end(text)
        num_tokens = len(self._ids)
        if end is not None:
            finish_reason, text = "stop", text[:end]
            # Like the engine, drop everything after the token that completes a stop string.
            if self._stop_end(without_last) is not None:
                num_tokens = await self._first_with_stop()
        elif finish_reason in ENDED:
            text = without_last  # the last token ended the turn and is not part of the text
        message, has_calls = await self._parsed(text, num_tokens, finish_reason)
        if finish_reason in ENDED:
            finish_reason = "tool_calls" if has_calls else "stop"
        return Whole(message, finish_reason, num_tokens)

    @abstractmethod
    async def _decoded(self, tokens: list[list[int]]) -> list[str] | None:
        """Decode lists of tokens, none of them empty; None if that is impossible."""

    @abstractmethod
    async def _parsed(self, text: str, num_tokens: int, finish_reason: str) -> tuple[dict[str, Any], bool]:
        """Return the message of ``text``, that of the first ``num_tokens``, and whether it has tool calls."""

    async def _texts(self, *lengths: int) -> list[str] | None:
        """Decode the first ``length`` tokens for each of ``lengths``."""
        tokens = [self._ids[:length] for length in lengths if length]  # engines reject empty lists
        texts = await self._decoded(tokens)
        if texts is None or len(texts) != len(tokens):
            return None
        left = iter(texts)
        return [next(left) if length else "" for length in lengths]

    def _stop_end(self, text: str) -> int | None:
        """Return where the first stop string ends the text, or None."""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        return at + len(stop) if self._body.get("no_stop_trim") else at

    async def _first_with_stop(self) -> int:
        """Return the number of tokens after which an engine that saw all of them would have stopped."""
        # Bisect, because each probe is an engine call. Once a text has a stop string, every longer one does.
        low, high = 0, len(self._ids) - 1
        while high - low > 1:
            middle = (low + high) // 2
            (text,) = await self._texts(middle) or [""]
            low, high = (low, middle) if self._stop_end(text) is not None else (middle, high)
        return high


class OwnReading(MessageReading):
    """Decodes with the model's own tokenizer if no engine can be asked; nothing is parsed."""

    def __init__(self, text_of: TextOf, turn: Turn, body: Mapping[str, Any]) -> None:
        super().__init__(turn, body)
        self._text_of = text_of

    async def _decoded(self, tokens: list[list[int]]) -> list[str] | None:
        return [self._text_of(ids, not self._skips_special) for ids in tokens]

    async def _parsed(self, text: str, num_tokens: int, finish_reason: str) -> tuple[dict[str, Any], bool]:  # noqa: ARG002
        return {"role": "assistant", "content": text}, False


class EngineReading(MessageReading):
    """Decodes and parses with SGLang's own tokenizer and parsers."""

    def __init__(self, admin: WorkerAdmin, turn: Turn, body: Mapping[str, Any]) -> None:
        super().__init__(turn, body)
        self._admin = admin

    async def _decoded(self, tokens: list[list[int]]) -> list[str] | None:
        asked = {"tokens": tokens, "skip_special_tokens": self._skips_special}
        texts = (await self._admin.post_json("/detokenize", asked) or {}).get("text")
        return list(map(str, texts)) if isinstance(texts, list) else None

    async def _parsed(self, text: str, num_tokens: int, finish_reason: str) -> tuple[dict[str, Any], bool]:  # noqa: ARG002
        info = await self._admin.model_info()
        parsers: Mapping[str, Any] = info.raw if info is not None else {}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if (parser := parsers.get("reasoning_parser")) and self._body.get("separate_reasoning", True):
            asked = {"text": text, "reasoning_parser": parser}
            parsed = _parsed_by(await self._admin.post_json("/separate_reasoning", asked))
            if parsed.reasoning_text:
                message |= {"content": parsed.text or "", "reasoning_content": parsed.reasoning_text}
        if (parser := parsers.get("tool_call_parser")) and self._has_tools:
            asked = {"text": message["content"], "tools": self._body["tools"], "tool_call_parser": parser}
            parsed = _parsed_by(await self._admin.post_json("/parse_function_call", asked))
            if parsed.calls:
                message |= {"content": parsed.normal_text or "", "tool_calls": list(map(_tool_call, parsed.calls))}
        return message, "tool_calls" in message


def _parsed_by(answer: Mapping[str, Any] | None) -> _Parsed:
    try:
        return msgspec.convert(answer or {}, _Parsed)
    except UNREADABLE as error:
        raise unreadable(answer, "message", error) from error


def _tool_call(call: _ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.parameters or "{}"}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
