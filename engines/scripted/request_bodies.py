"""From the bodies of chats and of ``/generate`` to the calls that a script is asked."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.engines.scripted.script import LIMITS, ScriptedCall
from forebay.engines.scripted.tokens import VOCABULARY_SIZE, encode, encode_chat, open_chat

WHOLE_ONLY = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")


def chat_calls(body: dict[str, Any]) -> list[ScriptedCall]:
    """The choices of a chat. Raises ``InvalidInput`` where SGLang answers 400."""
    check_messages(body.get("messages"))
    for name in WHOLE_ONLY:
        if body.get("stream") and body.get(name):
            raise InvalidInput(
                f"{name} is not supported with streaming. Please set stream=false when using {name}=true."
            )
    prompt_ids = _chat_prompt(body)
    opened = open_chat(prompt_ids)
    said = opened[1] if opened else ""
    _check_limits(body)
    return [ScriptedCall(at, body, prompt_ids, said=said) for at in range(_count(body, "n") or 1)]


def generate_calls(body: dict[str, Any]) -> list[ScriptedCall]:
    """The choices of every prompt of ``/generate``. Raises ``InvalidInput`` where SGLang answers 400."""
    prompts, params = _prompts(body), body.get("sampling_params") or {}
    every = params if isinstance(params, list) else [params] * len(prompts)
    rids = body.get("rid")
    calls: list[ScriptedCall] = []
    for at, (prompt_ids, own) in enumerate(zip(prompts, every, strict=False)):
        rid = rids[at] if isinstance(rids, list) else f"{rids}_{at}" if rids and len(prompts) > 1 else rids
        _check_limits(own)
        for _ in range(_count(own, "n") or 1):
            calls.append(_generate_call(body | {"rid": rid, "sampling_params": own}, prompt_ids, len(calls)))
    return calls


def is_batch(body: Mapping[str, Any]) -> bool:
    """Whether ``/generate`` is asked for a list: several prompts, or several choices."""
    prompts = body.get("input_ids") or body.get("text")
    params = body.get("sampling_params") or {}
    nested = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return nested or isinstance(params, list) or (params.get("n") or 1) > 1


def checked_ids(ids: object) -> list[int]:
    """The token ids that a body gave. Raises ``InvalidInput``."""
    if not isinstance(ids, list) or not ids:
        raise InvalidInput("input_ids cannot be empty.", field="input_ids")
    if not all(isinstance(token, int) and 0 <= token < VOCABULARY_SIZE for token in ids):
        raise InvalidInput(f"token ids should be from 0 to {VOCABULARY_SIZE - 1}", field="input_ids")
    return list(ids)


def check_messages(messages: object) -> None:
    """Raise ``InvalidInput`` for messages that are none."""
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("Messages cannot be empty.", field="messages")
    if not all(isinstance(message, dict) for message in messages):
        raise InvalidInput("each message should be an object", field="messages")


def _check_limits(params: Mapping[str, Any]) -> None:
    for name in LIMITS:
        _count(params, name)


def _count(params: Mapping[str, Any], name: str) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} should be a number", field=name) from error


def _generate_call(body: dict[str, Any], prompt_ids: list[int], at: int) -> ScriptedCall:
    opened = open_chat(prompt_ids)
    messages, said = opened or ([], "")
    return ScriptedCall(at, {**body, "messages": messages}, prompt_ids, said=said, is_asked=opened is not None)


def _chat_prompt(body: Mapping[str, Any]) -> list[int]:
    if body.get("input_ids") is not None:
        return checked_ids(body["input_ids"])
    continues = bool(body.get("continue_final_message")) and body["messages"][-1].get("role") == "assistant"
    return encode_chat(body["messages"], body.get("tools") or (), is_continued=continues)


def _prompts(body: Mapping[str, Any]) -> list[list[int]]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise InvalidInput("Either text, input_ids or input_embeds should be provided.")
    if ids is None:
        return [encode(str(part)) for part in (text if isinstance(text, list) else [text])]
    nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return [checked_ids(part) for part in (ids if nested else [ids])]
