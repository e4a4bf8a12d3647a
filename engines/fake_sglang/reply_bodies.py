"""Write replies, whole or in chunks: OpenAI's chat completion with SGLang's fields, and ``/generate``'s reply."""

import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from itertools import groupby
from typing import Protocol

from forebay.engines.fake_sglang.backend import Backend
from forebay.engines.fake_sglang.calls import Choice, JSONObject, Piece, PromptCall, TokenChoice
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody, StreamOptions


class ReplyWriter(Protocol):
    """Writes the reply to one request, whole or as the chunks of a stream."""

    def whole(self, choices: Sequence[Choice]) -> JSONObject | list[JSONObject]:
        """Return the whole body."""

    def grown(self, choice: Choice, piece: Piece) -> Iterator[JSONObject]:
        """Yield the chunks of a choice's newest piece."""

    def failed(self, message: str, status: int) -> JSONObject:
        """Return the chunk of an error."""

    def closing(self, choices: Sequence[Choice]) -> Iterator[JSONObject]:
        """Yield the last chunks, after every choice."""


class ChatWriter:
    """Writes the reply to a chat."""

    def __init__(self, body: ChatBody, call: PromptCall, backend: Backend) -> None:
        self._body = body
        self._call = call
        self._backend = backend
        self._options = body.stream_options or StreamOptions()
        self._created = int(time.time())
        self._num_sent: dict[Choice, int] = {}
        """Number of tokens of each choice already sent in chunks."""

    def whole(self, choices: Sequence[Choice]) -> JSONObject:
        """Return the body of a chat that is not streamed."""
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(choice) for choice in choices],
            "usage": _usage(choices),
            "metadata": weight_metadata(choices[0].versions, self._backend.weight_version),
        }
        return body | self._sglext(choices)

    def grown(self, choice: Choice, piece: Piece) -> Iterator[JSONObject]:
        """Yield a chunk with the new text; tool calls and the finish reason get chunks of their own."""
        if choice not in self._num_sent:
            self._num_sent[choice] = 0
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        # Taken with every piece, as in SGLang: logprobs that no chunk contains are lost.
        logprobs = self._new_logprobs(choice)
        if piece.text or piece.reasoning:
            delta = {"content": piece.text or None, "reasoning_content": piece.reasoning or None}
            yield self._chunk(choice, delta, logprobs) | self._running_usage(choice)
        elif logprobs is not None and self._backend.tells_textless_logprobs:
            yield self._chunk(choice, {}, logprobs) | self._running_usage(choice)
        if piece.finish_reason is not None:
            yield from self._tool_chunks(choice)
            end = self._chunk(choice, {})
            end["choices"][0] |= {"finish_reason": piece.finish_reason, "matched_stop": piece.matched_stop}
            yield end

    def failed(self, message: str, status: int) -> JSONObject:
        """Return the chunk of an error."""
        return {"error": error_body(message, status)}

    def closing(self, choices: Sequence[Choice]) -> Iterator[JSONObject]:
        """Yield token ids and usage, if requested."""
        head, ids = {**self._head("chat.completion.chunk"), "choices": []}, self._sglext(choices)
        if ids:
            yield {**head, "usage": None, **ids}
        if self._options.include_usage:
            yield {**head, "usage": _usage(choices)}

    def _head(self, kind: str) -> JSONObject:
        # SGLang repeats the requested model name.
        model = self._body.model or self._backend.name
        return {"id": self._call.rid, "object": kind, "created": self._created, "model": model}

    def _choice(self, choice: Choice) -> JSONObject:
        message = {"role": "assistant", "content": choice.text, "reasoning_content": choice.reasoning or None}
        body = {
            "index": choice.index,
            "message": message | ({"tool_calls": choice.tool_calls} if choice.tool_calls else {}),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }
        if self._body.return_token_ids:
            body |= {"prompt_token_ids": choice.call.prompt_ids, "response_token_ids": choice.token_ids}
        if self._body.return_meta_info:
            body["meta_info"] = meta_info(choice, self._backend, with_logprobs=bool(self._body.logprobs))
        return body

    def _chunk(self, choice: Choice, delta: JSONObject, logprobs: JSONObject | None = None) -> JSONObject:
        body = {
            "index": choice.index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": logprobs,
            "finish_reason": None,
            "matched_stop": None,
        }
        return {**self._head("chat.completion.chunk"), "choices": [body]}

    def _tool_chunks(self, choice: Choice) -> Iterator[JSONObject]:
        for at, call in enumerate(choice.tool_calls):
            function = {"arguments": "", **call["function"]}
            # Clients expect the name first, and the arguments in a separate delta.
            begun = {**call, "index": at, "function": {**function, "arguments": ""}}
            yield self._chunk(choice, {"tool_calls": [begun]})
            yield self._chunk(choice, {"tool_calls": [{"index": at, "function": {"arguments": function["arguments"]}}]})

    def _running_usage(self, choice: Choice) -> JSONObject:
        is_wanted = self._options.include_usage and self._options.continuous_usage_stats
        return {"usage": _usage([choice])} if is_wanted else {}

    def _sglext(self, choices: Sequence[Choice]) -> JSONObject:
        ids: JSONObject = {}
        if self._body.return_input_ids_in_sglext:
            ids["input_ids"] = self._call.prompt_ids
        if self._body.return_output_ids_in_sglext:
            ids["output_ids"] = [choice.token_ids for choice in choices]
        return {"sglext": ids} if ids else {}

    def _new_logprobs(self, choice: Choice) -> JSONObject | None:
        new = choice.tokens[self._num_sent[choice] :]
        self._num_sent[choice] = len(choice.tokens)
        return self._logprobs(new) if new else None

    def _logprobs(self, tokens: Sequence[TokenChoice]) -> JSONObject | None:
        if not self._body.logprobs:
            return None
        return {"content": [{**self._token(t.token_id, t.logprob), "top_logprobs": self._top(t)} for t in tokens]}

    def _top(self, token: TokenChoice) -> list[JSONObject]:
        return [self._token(token_id, logprob) for token_id, logprob in token.top]

    def _token(self, token_id: int, logprob: float) -> JSONObject:
        text = self._backend.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class GenerateWriter:
    """Writes the reply to ``/generate``; each chunk of a stream repeats everything so far."""

    def __init__(self, body: GenerateBody, calls: Sequence[PromptCall], backend: Backend) -> None:
        self._body = body
        self._backend = backend
        self._is_list = body.is_list or calls[0].n > 1

    def whole(self, choices: Sequence[Choice]) -> JSONObject | list[JSONObject]:
        """Return one reply, or a list of replies."""
        replies = [self._generated(choice) for choice in choices]
        return replies if self._is_list else replies[0]

    def grown(self, choice: Choice, piece: Piece) -> Iterator[JSONObject]:
        """Yield the whole choice so far."""
        yield self._generated(choice) | ({"index": piece.index} if self._is_list else {})

    def failed(self, message: str, status: int) -> JSONObject:
        """Return the chunk of an error; ``/generate`` errors have no status."""
        del status
        return generate_error(message)

    def closing(self, choices: Sequence[Choice]) -> Iterator[JSONObject]:
        """Yield nothing."""
        del choices
        return iter(())

    def _generated(self, choice: Choice) -> JSONObject:
        meta = meta_info(
            choice,
            self._backend,
            with_logprobs=self._body.return_logprob,
            with_texts=self._body.return_text_in_logprobs,
        )
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def meta_info(choice: Choice, backend: Backend, *, with_logprobs: bool, with_texts: bool = False) -> JSONObject:
    """SGLang's ``meta_info`` of a choice. Weight spans are included once the choice has ended."""
    info: JSONObject = {
        "id": choice.call.rid,
        "finish_reason": _finish(choice),
        "prompt_tokens": len(choice.call.prompt_ids),
        "num_retractions": choice.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": len(choice.tokens),
        "cached_tokens": choice.milestones.cached_tokens,
        **_reply_times(choice, with_stages=backend.has_metrics),
        **weight_metadata(choice.versions, backend.weight_version),
    }
    # In a stream SGLang sends the spans in the last chunk only.
    if choice.finish_reason is None:
        del info["weight_versions"]
    return info | (_meta_logprobs(choice, backend if with_texts else None) if with_logprobs else {})


def weight_metadata(versions: Sequence[str], current: str) -> JSONObject:
    """Token spans of each weight version, and the newest version; the current version without tokens."""
    spans: list[JSONObject] = []
    for version, tokens in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
    spans = spans or [{"version": current, "start": 0, "end": 0}]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans}


def error_body(message: str, status: int, *, param: str | None = None) -> JSONObject:
    """An error in SGLang's format, which OpenAI's clients can read."""
    kind = "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}


def generate_error(message: str) -> JSONObject:
    """An error of ``/generate`` in SGLang's format."""
    return {"error": {"message": message}}


def _meta_logprobs(choice: Choice, texts: Backend | None) -> JSONObject:
    def entry(logprob: float | None, token: int) -> list[object]:
        return [logprob, token, None if texts is None else texts.token_text(token)]

    call = choice.call
    asked = () if call.logprob_start is None else call.prompt_ids[call.logprob_start :]
    # The first token has no logprob, because no token precedes it.
    scored = zip((None, *call.prompt_logprobs), asked, strict=True) if asked else ()
    return {
        "input_token_logprobs": [entry(logprob, token) for logprob, token in scored],
        "output_token_logprobs": [entry(token.logprob, token.token_id) for token in choice.tokens],
        "output_token_logprobs_length": len(choice.tokens),
    }


def _finish(choice: Choice) -> JSONObject | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(choice.tokens)}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case _:
            return {"type": "stop", "matched": choice.matched_stop}


def _usage(choices: Sequence[Choice]) -> JSONObject:
    prompt, completion = len(choices[0].call.prompt_ids), sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _reply_times(choice: Choice, *, with_stages: bool) -> JSONObject:
    """``e2e_latency`` of a finished choice; ``with_stages`` adds SGLang's fields under ``--enable-metrics``.

    Latencies are in seconds, timestamps in seconds since the Unix epoch. Events that have not happened are left out.
    """
    arrived_s, ended_s = choice.call.arrived_s, choice.milestones.ended_s
    fields: JSONObject = {} if ended_s is None else {"e2e_latency": ended_s - arrived_s}
    return fields | (_stages(choice) if with_stages else {})


def _stages(choice: Choice) -> JSONObject:
    reached, arrived_s = choice.milestones, choice.call.arrived_s
    to_wall_s = time.time() - time.monotonic()
    fields: JSONObject = {}
    if reached.begun_s is not None:
        fields |= {"queue_time": reached.begun_s - arrived_s, "forward_entry_time": to_wall_s + reached.begun_s}
    if reached.prefilled_s is not None:
        fields["prefill_finished_time"] = to_wall_s + reached.prefilled_s
    if reached.ended_s is None:
        return fields
    # As in SGLang, these are sent only at the end.
    fields["request_received_ts"] = to_wall_s + arrived_s
    fields["request_finished_ts"] = to_wall_s + reached.ended_s
    if reached.prefilled_s is not None:
        fields["first_token_latency"] = reached.prefilled_s - arrived_s
        fields |= _throughput(len(choice.tokens) - 1, reached.ended_s - reached.prefilled_s)
    return fields


def _throughput(num_decoded: int, decode_s: float) -> JSONObject:
    """Tokens per second after the first one."""
    return {"decode_throughput": num_decoded / decode_s} if num_decoded > 0 and decode_s > 0 else {}
