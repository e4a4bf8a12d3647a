"""Read a streamed chat into turns, chunk by chunk."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.capture.engine_times import stream_times
from forebay.engines.capture.read_reply import UNKNOWN, call_fields, logprob_of, token_ids, version_spans
from forebay.engines.capture.read_rows import ROUTED, row_fields
from forebay.engines.capture.turn import Turn, VersionSpan


class StreamReader:
    """Collects the chunks of one streamed chat; ``turns`` returns the result, also before the stream ends.

    SGLang sends ids in the last chunks of a stream (``sglext``), vLLM in each chunk. A stream of SGLang has no weight
    version, and no logprob for a token without text of its own: ``complete`` in ``fill_gaps.py`` fetches both.
    """

    def __init__(
        self, request_body: Mapping[str, Any], *, rid: str | None = None, engine_url: str = "", began_s: float = 0.0
    ) -> None:
        self._call = call_fields(request_body, rid=rid, engine_url=engine_url, began_s=began_s)
        self._request = request_body
        self._rows: Mapping[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._prompt_ids: list[int] | None = None
        self._usage: dict[str, Any] = {}
        self._metrics: object = None
        self._first_token_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the ids arrived. In an SGLang stream they follow everything that the client wants to see."""
        return self._prompt_ids is not None and all(c.sampled_ids is not None for c in self._choices.values())

    @property
    def is_begun(self) -> bool:
        """Whether any chunk contained a choice."""
        return bool(self._choices)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def stop(self) -> None:
        """Stop reading for the client: only ids still count, and only for tokens the client has read."""
        for choice in self._choices.values():
            choice.stop()

    def feed(self, chunk: Mapping[str, Any]) -> None:
        """Add one decoded chunk."""
        for choice in chunk.get("choices") or []:
            self._choice(choice.get("index") or 0).feed(choice, _num_sampled(chunk))
            self._note_first(choice)
        # Counts in a chunk with choices are partial; the last chunk has no choices and the final counts.
        if chunk.get("usage") and not chunk.get("choices"):
            self._usage = dict(chunk["usage"])
        self._metrics = chunk.get("metrics") or self._metrics
        self._read_ids(chunk)

    def turns(self, *, ended_s: float = 0.0) -> list[Turn]:
        """Return a turn for every choice that has begun."""
        common: dict[str, Any] = {"usage": self._usage, "first_token_s": self._first_token_s, "ended_s": ended_s}
        common["engine"] = stream_times(self._usage, self._metrics, self._first_token_s, ended_s)
        return [
            Turn(**self._call, **choice.fields(self._prompt_ids), **self._row_fields(index), **common, choice=index)
            for index, choice in sorted(self._choices.items())
        ]

    def _row_fields(self, index: int) -> dict[str, Any]:
        # The engine sends the rows of one choice only: the one that began first, for all tokens that it sampled.
        first, num_prompt = next(iter(self._choices)), len(self._prompt_ids or ())
        sampled = self._choices[first].sampled_ids
        if not self._rows or not num_prompt or sampled is None:
            return {}
        found = row_fields(self._request, self._rows, num_prompt, len(sampled))
        if index == first:
            return found
        rows = found.get("arrays", {}).get(ROUTED, ())
        # The other choices have the same prompt.
        shared = [each.between(each.start, min(num_prompt, each.end)) for each in rows if each.start < num_prompt]
        return {"arrays": {ROUTED: shared}} if shared else {}

    def _choice(self, index: int) -> "_Choice":
        return self._choices.setdefault(index, _Choice())

    def _note_first(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if self._first_token_s is None and any(
            delta.get(name) for name in ("content", "reasoning_content", "tool_calls")
        ):
            self._first_token_s = time.time()

    def _read_ids(self, chunk: Mapping[str, Any]) -> None:
        sglext = chunk.get("sglext") or {}
        prompt = token_ids(sglext.get("input_ids") or chunk.get("prompt_token_ids"))
        self._prompt_ids = prompt if prompt is not None else self._prompt_ids
        self._rows = sglext if sglext.get(ROUTED) else self._rows
        for index, ids in enumerate(sglext.get("output_ids") or []):
            self._choice(index).note_ids(token_ids(ids))


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    """By position among the sampled tokens."""
    is_placed: bool = True
    """Whether every chunk so far said which positions its logprobs belong to."""
    is_asked: bool = False
    """Whether logprobs were requested, so that a missing one is unknown."""
    sampled_ids: list[int] | None = None
    finish_reason: str = ""
    versions: list[VersionSpan] = field(default_factory=list)
    num_read: int = 0
    """Number of tokens the client has read, as far as the engine reports it."""
    is_stopped: bool = False

    def note_ids(self, ids: list[int] | None) -> None:
        """Record the ids that SGLang sends at the end, which it does only if logprobs were requested as well."""
        self.sampled_ids, self.is_asked = ids, True

    def stop(self) -> None:
        """Stop reading, unless the choice already ended."""
        if not self.finish_reason:
            self.is_stopped, self.finish_reason = True, "stop"

    def feed(self, choice: Mapping[str, Any], num_sampled: int | None) -> None:
        """Add one chunk's choice. ``num_sampled`` is its token count at this chunk, if the chunk reports it."""
        if self.is_stopped:
            return
        self.num_read = max(self.num_read, num_sampled or 0)
        delta = choice.get("delta") or {}
        self.text.append(delta.get("content") or "")
        self.reasoning.append(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or []:
            _add_tool_call(self.tool_calls.setdefault(call.get("index") or 0, {}), call)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if (ids := token_ids(choice.get("token_ids"))) is not None:
            self.sampled_ids = [*(self.sampled_ids or []), *ids]
        if choice.get("weight_versions"):
            self.versions = version_spans(choice, len(self.sampled_ids or ()))
        self._read_logprobs(choice, num_sampled)

    def fields(self, prompt_ids: list[int] | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"reply": self._reply(), "finish_reason": self.finish_reason}
        if prompt_ids is None or self.sampled_ids is None:
            return fields
        # The engine keeps sampling after its reader stopped; the client never saw those tokens.
        sampled_ids = self.sampled_ids[: self.num_read] if self.is_stopped else self.sampled_ids
        return fields | {
            "prompt_ids": prompt_ids,
            "sampled_ids": sampled_ids,
            "logprobs": self._placed_logprobs(len(sampled_ids)),
            "versions": self.versions,
            "is_kv_mixed": len(self.versions) > 1,
        }

    def _placed_logprobs(self, num_tokens: int) -> list[float] | None:
        if not self.logprobs and not self.is_asked:
            return None
        positions = range(num_tokens)
        # Without positions, logprobs match the tokens only if their counts are equal.
        if not self.is_placed and self.logprobs.keys() != set(positions):
            return [UNKNOWN] * num_tokens
        return [self.logprobs.get(position, UNKNOWN) for position in positions]

    def _read_logprobs(self, choice: Mapping[str, Any], num_sampled: int | None) -> None:
        content = (choice.get("logprobs") or {}).get("content") or []
        if content and num_sampled is None:
            self.is_placed = False
        first = len(self.logprobs) if num_sampled is None else num_sampled - len(content)
        self.logprobs.update((first + place, logprob_of(token.get("logprob"))) for place, token in enumerate(content))

    def _reply(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text)}
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call for _, call in sorted(self.tool_calls.items())]
        return message


def _num_sampled(chunk: Mapping[str, Any]) -> int | None:
    # The counts belong to a single choice only if the chunk has one choice.
    num_tokens = (chunk.get("usage") or {}).get("completion_tokens")
    return num_tokens if isinstance(num_tokens, int) and len(chunk.get("choices") or []) == 1 else None


def _add_tool_call(call: dict[str, Any], delta: Mapping[str, Any]) -> None:
    # Names and ids arrive once, arguments in pieces.
    function = call.setdefault("function", {"name": "", "arguments": ""})
    piece = delta.get("function") or {}
    function["name"] = function["name"] or piece.get("name") or ""
    function["arguments"] += piece.get("arguments") or ""
    call["id"] = call.get("id") or delta.get("id") or ""
    call["type"] = "function"
