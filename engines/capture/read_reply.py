"""Reading what engines tell into turns: whole chats, streamed chats, and SGLang's ``/generate``."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.engines.capture.read_stream import StreamReader
from forebay.engines.capture.request_fields import asking, strip
from forebay.engines.capture.turn import Turn
from forebay.engines.capture.turn_fields import call_fields, sampled_fields, token_ids, whole_logprobs

__all__ = ["StreamReader", "asking", "strip", "turns_of_chat", "turns_of_generate"]


def turns_of_chat(
    request_body: Mapping[str, Any],
    reply_body: Mapping[str, Any],
    *,
    rid: str | None = None,
    engine_url: str = "",
    began_s: float = 0.0,
    ended_s: float = 0.0,
) -> list[Turn]:
    """A turn for every choice of a whole chat completion; times in seconds since the Unix epoch.

    Ids are read where SGLang (``prompt_token_ids``, ``response_token_ids``) and vLLM (``token_ids``) tell them; a reply
    without them gives turns without ids.
    """
    call = call_fields(request_body, rid=rid, engine_url=engine_url, began_s=began_s)
    usage = dict(reply_body.get("usage") or {})
    return [
        Turn(**call, **_choice_fields(reply_body, choice, place), usage=usage, ended_s=ended_s)
        for place, choice in enumerate(reply_body.get("choices") or [])
    ]


def turns_of_generate(
    request_body: Mapping[str, Any],
    reply_body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    engine_url: str = "",
    began_s: float = 0.0,
    ended_s: float = 0.0,
) -> list[Turn]:
    """A turn for every reply of ``/generate`` to one prompt of ``input_ids``, asked with ``return_logprob``.

    ``messages`` are those that the prompt was rendered from.
    """
    call = call_fields({"messages": messages}, engine_url=engine_url, began_s=began_s)
    prompt_ids = token_ids(request_body.get("input_ids"))
    replies = [reply_body] if isinstance(reply_body, Mapping) else reply_body
    return [
        Turn(
            **call | {"rid": reply["meta_info"].get("id")},
            **sampled_fields(prompt_ids, token_ids(reply.get("output_ids")), reply["meta_info"]),
            reply={"role": "assistant", "content": reply.get("text") or ""},
            finish_reason=(reply["meta_info"].get("finish_reason") or {}).get("type", ""),
            choice=choice,
            usage={name: reply["meta_info"].get(name) for name in ("prompt_tokens", "completion_tokens")},
            ended_s=ended_s,
        )
        for choice, reply in enumerate(replies)
    ]


def _choice_fields(reply: Mapping[str, Any], choice: Mapping[str, Any], place: int) -> dict[str, Any]:
    prompt = token_ids(choice.get("prompt_token_ids") or reply.get("prompt_token_ids"))
    sampled = choice.get("response_token_ids")
    sampled_ids = token_ids(choice.get("token_ids") if sampled is None else sampled)
    meta_info = choice.get("meta_info") or reply.get("metadata") or {}
    fields = sampled_fields(prompt, sampled_ids, meta_info)
    if fields["logprobs"] is None and sampled_ids is not None:
        fields["logprobs"] = whole_logprobs(choice.get("logprobs"), len(sampled_ids))
    return {
        **fields,
        "reply": dict(choice.get("message") or {}),
        "finish_reason": choice.get("finish_reason") or "",
        "choice": choice.get("index", place),
    }
