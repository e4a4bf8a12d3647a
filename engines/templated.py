"""Chats over SGLang's ``/generate``: the prompt is rendered here, and token ids come back through any router."""

import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import msgspec

from forebay.core.errors import EngineError, InvalidInput, MissingExtra
from forebay.engines.abc import ChatReply, ChatRequest
from forebay.engines.wire import read_reply, status_error, unreachable

Render = Callable[[Sequence[Mapping[str, Any]]], list[int]]
"""From chat messages to the token ids of a prompt that waits for the assistant."""

PARAM_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")},
}
"""The sampling parameters of a chat that ``/generate`` has too, and their names there."""


def load_template(folder: str | Path) -> Render:
    """The chat template and tokenizer of a model folder. Raises ``MissingExtra`` without ``transformers``."""
    tokenizer = _tokenizer(folder)
    if not tokenizer.chat_template:
        raise InvalidInput(f"the tokenizer in {folder} has no chat template", hint="give the folder of a chat model")

    def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(prompt, add_special_tokens=False))

    return render


def _tokenizer(folder: str | Path) -> Any:
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "local") from error
    path = Path(folder) / "tokenizer_config.json"
    named = msgspec.json.decode(path.read_bytes()).get("tokenizer_class") if path.is_file() else None
    # The first goes by the model's type and would cut the text as that type's own tokenizer does, unlike SGLang.
    is_generic = named in {"TokenizersBackend", "PreTrainedTokenizerFast"}
    return (PreTrainedTokenizerFast if is_generic else AutoTokenizer).from_pretrained(str(folder))


def can_render(request: ChatRequest) -> bool:
    """Whether ``/generate`` does the same: not with tools, or what only a chat knows."""
    is_plain = not request.tools and not request.extra and not request.continue_final_message
    return is_plain and request.sampling_params.keys() <= PARAM_NAMES.keys()


async def templated_chat(http: httpx.AsyncClient, url: str, request: ChatRequest, render: Render) -> ChatReply:
    """One chat over ``/generate`` at ``url``; the choices of ``raw`` hold ids and logprobs as SGLang's chats do.

    Reasoning is not told apart from the text. Raises as ``Engine.chat`` does.
    """
    prompt_ids = render(request.messages)
    params = {PARAM_NAMES[name]: value for name, value in request.sampling_params.items()}
    body = {"input_ids": prompt_ids, "sampling_params": {**params, "n": request.n}, "return_logprob": True}
    content = await _posted(http, url, body | ({} if request.rid is None else {"rid": request.rid}))
    try:
        told = msgspec.json.decode(content)
        whole = _as_chat(told if isinstance(told, list) else [told], prompt_ids)
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/generate answered no completion: {content[:200]!r}", status_code=200) from error
    return read_reply(msgspec.json.encode(whole), request.rid)


async def _posted(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> bytes:
    try:
        reply = await http.post(f"{url}/generate", json=body, timeout=None)
    except httpx.TransportError as error:
        raise unreachable(url, error) from error
    if reply.status_code != HTTPStatus.OK:
        raise status_error(url, reply.status_code, reply.content)
    return reply.content


def _as_chat(replies: Sequence[Mapping[str, Any]], prompt_ids: list[int]) -> dict[str, Any]:
    num_sampled = sum(len(reply["output_ids"]) for reply in replies)
    meta_info = replies[0]["meta_info"]
    versions = ("weight_version", "weight_versions")
    return {
        "id": meta_info.get("id"),
        "object": "chat.completion",
        "created": int(time.time()),
        "choices": [_choice(index, reply, prompt_ids) for index, reply in enumerate(replies)],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": num_sampled,
            "total_tokens": len(prompt_ids) + num_sampled,
        },
        "metadata": {name: meta_info[name] for name in versions if name in meta_info},
    }


def _choice(index: int, reply: Mapping[str, Any], prompt_ids: list[int]) -> dict[str, Any]:
    finish = reply["meta_info"].get("finish_reason") or {}
    return {
        "index": index,
        "message": {"role": "assistant", "content": reply["text"]},
        "logprobs": None,
        "finish_reason": finish.get("type"),
        "matched_stop": finish.get("matched"),
        "prompt_token_ids": prompt_ids,
        "response_token_ids": reply["output_ids"],
        "meta_info": reply["meta_info"],
    }
