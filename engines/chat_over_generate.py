"""Send chats through SGLang's ``/generate``: prompts are rendered locally, so any router returns token ids."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from forebay.core.errors import InvalidInput
from forebay.engines.capture.read_reply import logprob_of
from forebay.engines.capture.reply_shape import GENERATED, read_generated
from forebay.engines.chat_template import ChatTemplate, TextOf
from forebay.engines.read_json import unreadable

Json = dict[str, Any]

LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
PARAM_NAMES = {
    **dict.fromkeys(LIMIT_NAMES, "max_new_tokens"),
    **dict.fromkeys(("min_new_tokens", "min_tokens"), "min_new_tokens"),
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("skip_special_tokens", "no_stop_trim")},
}
"""The sampling parameters of a chat that ``/generate`` also has, with their names there."""
KNOWN_NAMES = PARAM_NAMES.keys() | {
    *("messages", "input_ids", "n", "rid", "extra_key", "logprobs"),
    *("return_token_ids", "return_prompt_token_ids", "return_meta_info"),
    # Meaningless without tools, or with a router that serves one model.
    *("model", "user", "tool_choice", "parallel_tool_calls", "add_generation_prompt"),
}
"""The fields of a chat that ``/generate`` can serve; any other must be null, false, 0 or empty."""
PASSED_ON = ("rid", "extra_key")
OF_THE_BODY = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that do not apply to a replaced body."""


class TemplatedCall:
    """One chat sent through ``/generate``: the request to send instead, and its reply converted to a chat's."""

    def __init__(self, chat: Mapping[str, Any], prompt_ids: list[int], template: ChatTemplate) -> None:
        self._chat = chat
        self._prompt_ids = prompt_ids
        self._template = template

    @classmethod
    def of(cls, sent: Mapping[str, Any], client_body: Mapping[str, Any], template: ChatTemplate) -> Self | None:
        """Return the call for the chat that would be ``sent``; None if ``/generate`` cannot serve it."""
        # Capture always requests logprobs in `sent`; the reply must have them only if the client requested them.
        chat = {**sent, "logprobs": client_body.get("logprobs")}
        prompt_ids = rendered(chat, template)
        return None if prompt_ids is None else cls(chat, prompt_ids, template)

    def options(self, bound: Any, url: str) -> Any:
        """Return the openai package's request to send instead of ``bound``."""
        body = generate_body(self._chat, self._prompt_ids)
        return bound.model_copy(update={"url": f"{url}/generate", "json_data": body, "extra_json": None})

    def response(self, response: Any) -> Any:
        """Convert the HTTP response to that of a chat. Raises ``EngineError`` for a malformed reply."""
        content = as_chat(response.content, self._chat, self._prompt_ids, self._template)
        return with_body(response, content)


def rendered(body: Mapping[str, Any], template: ChatTemplate) -> list[int] | None:
    """Render the prompt of a chat with this body; None for a chat that ``/generate`` cannot serve.

    None for chats with tools, streams, chats without a token limit (``/generate`` would use 128), and chats with other
    fields that only the chat route knows. Also None if the template rejects the messages: the engine reports the error.
    """
    # Fields with an empty value (null, false, 0, empty) are allowed; a sampling parameter of 0 is not empty.
    asked = {name for name, value in body.items() if value or name in PARAM_NAMES}
    if not asked <= KNOWN_NAMES or not any(body.get(name) for name in LIMIT_NAMES):
        return None
    if body.get("input_ids"):
        return list(body["input_ids"])
    if not all(map(_is_text, body["messages"])):
        return None
    try:
        return template.render(body["messages"])
    except InvalidInput:
        return None


def _is_text(message: Mapping[str, Any]) -> bool:
    is_plain = message.get("role") != "tool" and not message.get("tool_calls")
    return is_plain and isinstance(message.get("content"), str | None)


def generate_body(body: Mapping[str, Any], prompt_ids: Sequence[int]) -> Json:
    """Return the ``/generate`` request for a chat with this body."""
    params = {theirs: body[ours] for ours, theirs in PARAM_NAMES.items() if body.get(ours) is not None}
    passed_on = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    return {
        "input_ids": list(prompt_ids),
        "sampling_params": {**params, "n": body.get("n") or 1},
        "return_logprob": True,
        **passed_on,
    }


def as_chat(content: bytes, body: Mapping[str, Any], prompt_ids: list[int], template: ChatTemplate) -> bytes:
    """Convert a reply of ``/generate`` to a chat reply; its choices have ids and logprobs as SGLang's do.

    Reasoning stays in the text. Raises ``EngineError`` for a malformed reply.
    """
    replies = read_generated(content)
    texts = template.text_of if body.get("logprobs") else None
    try:
        choices = [_choice(index, reply, prompt_ids, texts) for index, reply in enumerate(replies)]
    except (OverflowError, IndexError, TypeError) as error:  # the tokenizer's errors for ids outside its vocabulary
        raise unreadable(content, GENERATED, error) from error
    return msgspec.json.encode(_chat(replies, choices, body.get("model"), len(prompt_ids)))


def _chat(replies: Sequence[Mapping[str, Any]], choices: list[Json], model: str | None, num_prompt: int) -> Json:
    num_sampled = sum(len(reply["output_ids"]) for reply in replies)
    meta_info = replies[0]["meta_info"]
    versions = ("weight_version", "weight_versions")
    return {
        "id": str(meta_info.get("id")),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model or "default",
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
        "metadata": {name: meta_info[name] for name in versions if name in meta_info},
    }


def _choice(index: int, reply: Mapping[str, Any], prompt_ids: list[int], text_of: TextOf | None) -> Json:
    """Convert one reply to a choice. ``text_of`` is set if the chat requests logprobs."""
    meta_info = reply["meta_info"]
    finish = meta_info.get("finish_reason") or {}
    return {
        "index": index,
        "message": {"role": "assistant", "content": reply["text"]},
        "logprobs": None if text_of is None else {"content": _logprobs(meta_info, text_of)},
        "finish_reason": finish.get("type"),
        "matched_stop": finish.get("matched"),
        "prompt_token_ids": prompt_ids,
        "response_token_ids": reply["output_ids"],
        "meta_info": meta_info,
    }


def _logprobs(meta_info: Mapping[str, Any], text_of: TextOf) -> list[Json]:
    entries: list[Json] = []
    for logprob, token_id, *_ in meta_info["output_token_logprobs"]:
        text = text_of([token_id], True)
        entries.append(
            {"token": text, "logprob": logprob_of(logprob), "bytes": list(text.encode()), "top_logprobs": []}
        )
    return entries


def with_body(response: Any, content: bytes) -> Any:
    """Copy an HTTP response with another body."""
    headers = [(name, value) for name, value in response.headers.items() if name.lower() not in OF_THE_BODY]
    return type(response)(response.status_code, headers=headers, content=content, request=response.request)
