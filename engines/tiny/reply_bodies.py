"""What clients get: OpenAI's chat completion, whole or in chunks, with the fields that SGLang adds.

One choice put together from its pieces, and what SGLang tells about it beside its text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.tiny.calls import Call, FinishReason, Piece
from forebay.engines.tiny.request_bodies import JSONObject
from forebay.engines.tiny.sampling import TokenChoice


@dataclass(slots=True)
class Choice:
    """One choice, put together from its pieces."""

    text: str = ""
    tokens: list[TokenChoice] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    versions: list[str] = field(default_factory=list)
    num_retractions: int = 0

    def add(self, piece: Piece) -> None:
        """Grow by a piece."""
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.versions.extend(piece.versions)
        self.num_tokens = piece.num_tokens
        self.num_retractions = piece.num_retractions
        self.finish_reason, self.matched_stop = piece.finish_reason, piece.matched_stop

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        return [token.token_id for token in self.tokens]


def generated(call: Call, choice: Choice, version: str, *, tokenizer: Any = None, with_logprobs: bool) -> JSONObject:
    """One reply, as far as it has come; logprobs carry their token's text where a tokenizer is given."""
    return {
        "text": choice.text,
        "output_ids": choice.token_ids,
        "meta_info": meta_info(call, choice, version, tokenizer=tokenizer, with_logprobs=with_logprobs),
    }


def weight_metadata(versions: Sequence[str], current: str) -> JSONObject:
    """Which weights gave which tokens, as SGLang tells it: of the first choice, and the newest of them by itself."""
    spans: list[JSONObject] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    spans = spans or [{"version": current, "start": 0, "end": 0}]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans}


def meta_info(
    call: Call, choice: Choice, version: str, *, tokenizer: Any = None, with_logprobs: bool = False
) -> JSONObject:
    """What is told beside the text; ``version`` names the weights of now. The spans of weights come with the last."""
    told: JSONObject = {
        "id": call.rid,
        "finish_reason": _finish(choice),
        "prompt_tokens": len(call.prompt_ids),
        "num_retractions": choice.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": choice.num_tokens,
        "cached_tokens": 0,
        **weight_metadata(choice.versions, version),
    }
    if choice.finish_reason is None:
        del told["weight_versions"]
    return told | (_logprobs(call, choice, tokenizer) if with_logprobs else {})


def _logprobs(call: Call, choice: Choice, tokenizer: Any) -> JSONObject:
    output = [[token.logprob, token.token_id, _text(token.token_id, tokenizer)] for token in choice.tokens]
    asked = [] if call.logprob_start is None else call.prompt_ids[call.logprob_start :]
    scored: Sequence[float | None] = (None, *call.prompt_logprobs)
    given = zip(scored, asked, strict=True) if asked else ()
    return {
        "input_token_logprobs": [[logprob, token, _text(token, tokenizer)] for logprob, token in given],
        "output_token_logprobs": output,
        "output_token_logprobs_length": len(output),
    }


def _text(token_id: int, tokenizer: Any) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def _finish(choice: Choice) -> JSONObject | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": choice.num_tokens}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "stop":
            return {"type": "stop", "matched": choice.matched_stop}


@dataclass(frozen=True, slots=True)
class Told:
    """What a caller asked to be told beside the text."""

    logprobs: bool = False
    token_ids: bool = False
    meta_info: bool = False
    input_ids_in_sglext: bool = False
    output_ids_in_sglext: bool = False


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
        told = [self._choice(index, choice) | self._extras(choice, version) for index, choice in enumerate(choices)]
        whole = {
            **self._head("chat.completion"),
            "choices": told,
            "usage": self.usage(choices),
            "metadata": weight_metadata(choices[0].versions, version),
        }
        return whole | self._sglext(choices)

    def opening(self, index: int) -> JSONObject:
        """The first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def grown(self, piece: Piece) -> list[JSONObject]:
        """The chunks of one piece; the finish reason has one of its own."""
        chunks, logprobs = [], self._logprobs(piece.tokens)
        if piece.text:
            chunks.append(self._chunk(piece.index, {"content": piece.text}, logprobs))
            logprobs = None
        if piece.finish_reason is not None:
            end = self._chunk(piece.index, {}, logprobs)
            end["choices"][0] |= {"finish_reason": piece.finish_reason, "matched_stop": piece.matched_stop}
            chunks.append(end)
        return chunks

    def closing(self, choices: Sequence[Choice], *, with_usage: bool) -> list[JSONObject]:
        """The last chunks: token ids and usage, where they were asked for."""
        head, ids = {**self._head("chat.completion.chunk"), "choices": []}, self._sglext(choices)
        chunks = [{**head, "usage": None, **ids}] if ids else []
        return chunks + ([{**head, "usage": self.usage(choices)}] if with_usage else [])

    def usage(self, choices: Sequence[Choice]) -> JSONObject:
        """Tokens read and generated."""
        prompt, completion = len(self._call.prompt_ids), sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }

    def _head(self, kind: str) -> JSONObject:
        return {"id": self._call.rid, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, choice: Choice) -> JSONObject:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "reasoning_content": None},
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }

    def _extras(self, choice: Choice, version: str) -> JSONObject:
        told: JSONObject = {}
        if self._told.token_ids:
            told = {"prompt_token_ids": list(self._call.prompt_ids), "response_token_ids": choice.token_ids}
        if self._told.meta_info:
            told["meta_info"] = meta_info(self._call, choice, version, with_logprobs=self._told.logprobs)
        return told

    def _sglext(self, choices: Sequence[Choice]) -> JSONObject:
        told: JSONObject = {}
        if self._told.input_ids_in_sglext:
            told["input_ids"] = list(self._call.prompt_ids)
        if self._told.output_ids_in_sglext:
            told["output_ids"] = [choice.token_ids for choice in choices]
        return {"sglext": told} if told else {}

    def _chunk(self, index: int, delta: JSONObject, logprobs: JSONObject | None = None) -> JSONObject:
        choice = {
            "index": index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": logprobs,
            "finish_reason": None,
            "matched_stop": None,
        }
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
