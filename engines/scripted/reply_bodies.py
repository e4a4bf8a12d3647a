"""The bodies of a scripted engine's answers, with the fields of SGLang 0.5.23."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from forebay.engines.scripted.script import ScriptedCall
from forebay.engines.scripted.tokens import TURN_END, TURN_START, decode, logprob

JSONObject = dict[str, Any]


class ChatWriter:
    """Writes the reply to one chat, whole or as the chunks of a stream."""

    def __init__(self, body: Mapping[str, Any], calls: Sequence[ScriptedCall], model: str) -> None:
        self._body = body
        self._calls = calls
        # With several choices SGLang gives each an id of its own.
        self._id = body.get("rid") or "scripted"
        self._model = body.get("model") or model
        self._created = int(time.time())
        self._shown = dict.fromkeys(calls, ("", "", 0))

    def whole(self) -> JSONObject:
        """The body of a chat that does not stream."""
        told = {
            **self._head("chat.completion"),
            "choices": [self._choice(call) for call in self._calls],
            "usage": self._usage(),
            "metadata": weight_metadata(self._calls[0]),
        }
        return told | self._token_ids()

    def opening(self, call: ScriptedCall) -> JSONObject:
        """The first chunk of a choice."""
        return self._chunk(call, {"role": "assistant", "content": ""})

    def grown(self, call: ScriptedCall, num_said: int) -> Iterator[JSONObject]:
        """A chunk of what came since the last one, if any of it is text; ``num_said`` tokens are said by now."""
        reasoning, text, num_told = self._shown[call]
        now = (*call.shown(num_said), num_said)
        delta = {"reasoning_content": now[0][len(reasoning) :], "content": now[1][len(text) :]}
        if any(delta.values()):
            self._shown[call] = now
            told = {name: more or None for name, more in delta.items()}
            chunk = self._chunk(call, told, self._logprobs(call, num_told, num_said))
            yield chunk | self._running(call, num_said)

    def ended(self, call: ScriptedCall) -> Iterator[JSONObject]:
        """The chunks of the calls of tools, and the one with the finish reason."""
        for at, tool_call in enumerate(_tool_calls(call)):
            function = {"arguments": "", **tool_call["function"]}
            begun = {**tool_call, "index": at, "function": {**function, "arguments": ""}}
            yield self._chunk(call, {"tool_calls": [begun]})
            yield self._chunk(call, {"tool_calls": [{"index": at, "function": {"arguments": function["arguments"]}}]})
        chunk = self._chunk(call, {})
        chunk["choices"][0] |= {"finish_reason": call.finished, "matched_stop": _matched(call)}
        yield chunk

    def closing(self) -> Iterator[JSONObject]:
        """The last chunks: token ids and usage, where they were asked for."""
        ids = self._token_ids()
        if ids:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": None, **ids}
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> JSONObject:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, call: ScriptedCall) -> JSONObject:
        reasoning, text = call.shown()
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning or None}
        told = {
            "index": call.choice,
            "message": message | ({"tool_calls": _tool_calls(call)} if _tool_calls(call) else {}),
            "logprobs": self._logprobs(call, 0),
            "finish_reason": call.finished,
            "matched_stop": _matched(call),
        }
        if self._body.get("return_token_ids"):
            told |= {"prompt_token_ids": call.prompt_ids, "response_token_ids": call.sampled_ids}
        if self._body.get("return_meta_info"):
            told["meta_info"] = meta_info(call)
        return told

    def _chunk(self, call: ScriptedCall, delta: JSONObject, logprobs: JSONObject | None = None) -> JSONObject:
        delta = {"reasoning_content": None, **delta}
        told = {"index": call.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None}
        return {**self._head("chat.completion.chunk"), "choices": [told]}

    def _logprobs(self, call: ScriptedCall, start: int, end: int | None = None) -> JSONObject | None:
        if not self._body.get("logprobs"):
            return None
        told = list(zip(call.sampled_ids, logprobs_of(call), strict=True))[start:end]
        return {"content": [_token(token, value) for token, value in told]}

    def _token_ids(self) -> JSONObject:
        told: JSONObject = {}
        if self._body.get("return_input_ids_in_sglext"):
            told["input_ids"] = self._calls[0].prompt_ids
        if self._body.get("return_output_ids_in_sglext"):
            told["output_ids"] = [call.sampled_ids for call in self._calls]
        return {"sglext": told} if told else {}

    def _running(self, call: ScriptedCall, num_said: int) -> JSONObject:
        """The usage of one choice so far, for a stream that wants it with every chunk."""
        options = self._body.get("stream_options") or {}
        is_wanted = options.get("include_usage") and options.get("continuous_usage_stats")
        return {"usage": _usage(len(call.prompt_ids), num_said)} if is_wanted else {}

    def _usage(self) -> JSONObject:
        return _usage(len(self._calls[0].prompt_ids), sum(len(call.sampled_ids) for call in self._calls))


def _usage(num_prompt: int, num_said: int) -> JSONObject:
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_said,
        "completion_tokens": num_said,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def generated(call: ScriptedCall, num_said: int, *, is_end: bool) -> JSONObject:
    """One reply of ``/generate``, as far as it had come with its first ``num_said`` tokens."""
    sampled, told = call.sampled_ids[:num_said], meta_info(call)
    if not is_end:
        told |= {"finish_reason": None, "completion_tokens": num_said}
        del told["weight_versions"]
    return {"text": decode(sampled), "output_ids": sampled, "meta_info": told}


def meta_info(call: ScriptedCall) -> JSONObject:
    """What SGLang tells about a request beside its text."""
    told = {
        "id": call.rid or "scripted",
        "finish_reason": _finish(call),
        "prompt_tokens": len(call.prompt_ids),
        "num_retractions": call.num_retractions,
        "completion_tokens": len(call.sampled_ids),
        "reasoning_tokens": 0,
        "cached_tokens": 0,
        **weight_metadata(call),
    }
    asks = call.body.get("return_logprob") or call.body.get("logprobs")
    return told | (_told_logprobs(call) if asks else {})


def weight_metadata(call: ScriptedCall) -> JSONObject:
    """The newest weight version of a call's tokens and the span of each."""
    spans: list[JSONObject] = []
    for version, tokens in groupby(call.versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
    spans = spans or [{"version": call.asked_version, "start": 0, "end": 0}]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans}


def logprobs_of(call: ScriptedCall) -> list[float]:
    """The logprob of each sampled token."""
    before = [call.prompt_ids[-1], *call.sampled_ids]
    return [logprob(*told) for told in zip(before, call.sampled_ids, call.versions, strict=False)]


def event(body: object) -> bytes:
    """A server-sent event."""
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def error_body(status: int, message: str) -> JSONObject:
    """An error of a chat as SGLang words it."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}


def _told_logprobs(call: ScriptedCall) -> JSONObject:
    output = [[value, token, None] for value, token in zip(logprobs_of(call), call.sampled_ids, strict=True)]
    start = call.body.get("logprob_start_len", -1)
    asked = call.prompt_ids[start:] if start >= 0 else []
    told = [None, *(logprob(*pair, call.asked_version) for pair in pairwise(asked))]
    return {
        "input_token_logprobs": [[value, token, None] for value, token in zip(told, asked, strict=False)],
        "output_token_logprobs": output,
        "output_token_logprobs_length": len(output),
    }


def _finish(call: ScriptedCall) -> JSONObject:
    if call.finished == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if call.finished == "length":
        return {"type": "length", "length": len(call.sampled_ids)}
    return {"type": "stop", "matched": _matched(call)}


def _matched(call: ScriptedCall) -> int | None:
    return TURN_END if call.sampled_ids[-1:] == [TURN_END] else None


def _tool_calls(call: ScriptedCall) -> list[JSONObject]:
    return [dict(told) for told in call.reply.tool_calls] if call.is_whole else []


def _token(token: int, value: float) -> JSONObject:
    text = decode([token])
    return {"token": text, "bytes": [token] if token < TURN_START else [], "logprob": value, "top_logprobs": []}
