"""What clients get: OpenAI's chat completion, whole or in chunks, with the fields that SGLang adds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.tiny.calls import Call, FinishReason, Piece
from forebay.engines.tiny.sampling import TokenChoice
from forebay.engines.tiny.wire import JSONObject


@dataclass(frozen=True, slots=True)
class Told:
    """What a caller asked to be told beside the text."""

    logprobs: bool = False
    token_ids: bool = False


@dataclass(slots=True)
class Choice:
    """One choice, put together from its pieces."""

    text: str = ""
    tokens: list[TokenChoice] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    versions: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Grow by a piece."""
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.versions.extend(piece.versions)
        self.num_tokens = piece.num_tokens
        self.finish_reason, self.matched_stop = piece.finish_reason, piece.matched_stop


class ReplyWriter:
    """Writes the bodies of one call's reply."""

    def __init__(self, call: Call, model: str, tokenizer: Any, told: Told) -> None:
        self._call = call
        self._model = model
        self._tokenizer = tokenizer
        self._told = told
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice], version: str) -> JSONObject:
        """The body of a call that does not stream; ``version`` names the weights of now."""
        told = [self._choice(index, choice) for index, choice in enumerate(choices)]
        metadata = _weight_metadata(choices[0].versions, version)
        return {**self._head("chat.completion"), "choices": told, "usage": self.usage(choices), "metadata": metadata}

    def opening(self, index: int) -> JSONObject:
        """The first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def grown(self, piece: Piece) -> JSONObject:
        """The chunk of one piece."""
        delta = {"content": piece.text} if piece.text or piece.tokens else {}
        chunk = self._chunk(piece.index, delta, piece.finish_reason, self._logprobs(piece.tokens))
        chunk["choices"][0]["matched_stop"] = piece.matched_stop
        return chunk

    def closing(self, choices: Sequence[Choice]) -> JSONObject:
        """The last chunk, with the usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> JSONObject:
        """Tokens read and generated."""
        prompt, completion = len(self._call.prompt_ids), sum(choice.num_tokens for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, kind: str) -> JSONObject:
        return {"id": self._call.rid, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, choice: Choice) -> JSONObject:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
            **self._token_ids(choice),
        }

    def _token_ids(self, choice: Choice) -> JSONObject:
        if not self._told.token_ids:
            return {}
        return {
            "prompt_token_ids": list(self._call.prompt_ids),
            "response_token_ids": [token.token_id for token in choice.tokens],
        }

    def _chunk(
        self, index: int, delta: JSONObject, reason: FinishReason | None = None, logprobs: JSONObject | None = None
    ) -> JSONObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenChoice]) -> JSONObject | None:
        if not self._told.logprobs:
            return None
        return {"content": [{**self._token(t.token_id, t.logprob), "top_logprobs": self._top(t)} for t in tokens]}

    def _top(self, token: TokenChoice) -> list[JSONObject]:
        return [self._token(token_id, logprob) for token_id, logprob in token.top]

    def _token(self, token_id: int, logprob: float) -> JSONObject:
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _weight_metadata(versions: Sequence[str], current: str) -> JSONObject:
    """Which weights gave which tokens, as SGLang tells it: of the first choice, and the newest of them by itself."""
    spans: list[JSONObject] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    spans = spans or [{"version": current, "start": 0, "end": 0}]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans}
