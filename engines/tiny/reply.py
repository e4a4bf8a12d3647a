"""What clients get: OpenAI's chat completion, whole or in chunks, with the fields that SGLang adds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.engines.tiny.calls import Call, Piece
from forebay.engines.tiny.choice import Choice, meta_info, weight_metadata
from forebay.engines.tiny.sampling import TokenChoice
from forebay.engines.tiny.wire import JSONObject


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
