"""Read whole chat replies and SGLang's ``/generate`` replies into turns."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.engines.capture.engine_times import engine_times
from forebay.engines.capture.policy_calls import asked
from forebay.engines.capture.read_rows import row_fields
from forebay.engines.capture.reply_shape import Ids
from forebay.engines.capture.turn import Turn, VersionSpan

UNKNOWN = float("nan")
"""Marks an unknown logprob of one token."""


def turns_of_chat(
    request_body: Mapping[str, Any],
    reply_body: Mapping[str, Any],
    *,
    rid: str | None = None,
    engine_url: str = "",
    began_s: float = 0.0,
    ended_s: float = 0.0,
) -> list[Turn]:
    """Return a turn for every choice of a whole chat completion; times in seconds since the Unix epoch.

    Reads ids from SGLang's fields (``prompt_token_ids``, ``response_token_ids``) or vLLM's (``token_ids``). A reply
    without ids yields turns without ids.
    """
    call = call_fields(request_body, rid=rid, engine_url=engine_url, began_s=began_s)
    usage = dict(reply_body.get("usage") or {})
    return [
        Turn(**call, **_choice_fields(request_body, reply_body, choice, place), usage=usage, ended_s=ended_s)
        for place, choice in enumerate(reply_body.get("choices") or [])
    ]


def _choice_fields(
    request: Mapping[str, Any], reply: Mapping[str, Any], choice: Mapping[str, Any], place: int
) -> dict[str, Any]:
    prompt = token_ids(choice.get("prompt_token_ids") or reply.get("prompt_token_ids"))
    # SGLang's names first, then vLLM's.
    sampled = choice.get("response_token_ids")
    sampled_ids = token_ids(choice.get("token_ids") if sampled is None else sampled)
    # vLLM has no object for the weight versions: they are fields of the choice.
    meta_info = choice.get("meta_info") or reply.get("metadata") or choice
    fields = _sampled_fields(prompt, sampled_ids, meta_info, request)
    # Engines other than SGLang send no `meta_info`.
    if fields["logprobs"] is None and sampled_ids is not None:
        fields["logprobs"] = _chat_logprobs(choice.get("logprobs"), len(sampled_ids))
    return {
        **fields,
        "reply": dict(choice.get("message") or {}),
        "finish_reason": choice.get("finish_reason") or "",
        "choice": choice.get("index", place),
        "engine": engine_times(reply, choice),
    }


def call_fields(
    body: Mapping[str, Any], *, rid: str | None = None, engine_url: str = "", began_s: float = 0.0
) -> dict[str, Any]:
    """Fields that all turns of one call share."""
    return {
        "messages": objects(body.get("messages")),
        "tools": objects(body.get("tools")),
        "image_options": options if isinstance(options := body.get("mm_processor_kwargs"), dict) else {},
        **asked(body),
        "rid": rid or body.get("rid"),
        "engine_url": engine_url,
        "began_s": began_s,
    }


def objects(value: object) -> list[dict[str, Any]]:
    """Return the messages or tools in the body of a client, which may be anything."""
    # A client may send anything; the engine rejects invalid values. Values are copied only when kept.
    if not isinstance(value, list | tuple):
        return []
    return [each if isinstance(each, dict) else dict(each) for each in value if isinstance(each, Mapping)]


def token_ids(value: object) -> list[int] | None:
    """Return ``value`` if it is a list of token ids, otherwise None."""
    try:
        return msgspec.convert(value, Ids)
    except msgspec.ValidationError:
        return None


def version_spans(metadata: object, num_tokens: int | None) -> list[VersionSpan]:
    """Spans in SGLang's ``metadata`` or ``meta_info``, or in a choice of vLLM.

    They are fitted to ``num_tokens`` sampled tokens (None: unchanged).
    """
    if not isinstance(metadata, Mapping):
        return []
    listed = metadata.get("weight_versions")
    if isinstance(listed, list) and listed:
        spans = [VersionSpan(str(span["version"]), span["start"], span["end"]) for span in listed]
        return spans if num_tokens is None or spans[-1].end == num_tokens else _stretched(spans, num_tokens)
    name = metadata.get("weight_version")
    return [] if name is None else [VersionSpan(str(name), 0, num_tokens or 0)]


def _stretched(spans: Sequence[VersionSpan], num_tokens: int) -> list[VersionSpan]:
    # An engine may or may not count the end token: the spans must cover exactly the tokens received.
    kept = [span for span in spans if span.start < num_tokens] or list(spans[:1])
    return [*kept[:-1], VersionSpan(kept[-1].version, kept[-1].start, num_tokens)]


def _chat_logprobs(logprobs: object, num_tokens: int) -> list[float] | None:
    """Convert OpenAI's ``logprobs`` of one choice; None unless there is one logprob per token."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(content, list) or len(content) != num_tokens:
        return None
    return [logprob_of(token.get("logprob")) for token in content]


def logprob_of(value: object) -> float:
    """Return a number as a float, and anything else as unknown."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else UNKNOWN


def _sampled_fields(
    prompt_ids: list[int] | None,
    sampled_ids: list[int] | None,
    meta_info: Mapping[str, Any],
    request: Mapping[str, Any],
) -> dict[str, Any]:
    """Token fields of a turn; ``meta_info`` is SGLang's, or the ``metadata`` of a chat."""
    if prompt_ids is None or sampled_ids is None:
        return {"versions": version_spans(meta_info, None), "logprobs": None}
    versions = version_spans(meta_info, len(sampled_ids))
    return {
        "prompt_ids": prompt_ids,
        "sampled_ids": sampled_ids,
        "logprobs": _meta_logprobs(meta_info.get("output_token_logprobs"), len(sampled_ids)),
        "versions": versions,
        # After a weight update in mid-call, the cache holds entries of the old weights. A retracted call is the
        # exception: its cache is recomputed.
        "is_kv_mixed": len(versions) > 1 and not meta_info.get("num_retractions"),
        **row_fields(request, meta_info, len(prompt_ids), len(sampled_ids), versions),
    }


def _meta_logprobs(triples: object, num_tokens: int) -> list[float] | None:
    """Logprobs of SGLang's ``meta_info``; None if it has none."""
    if not isinstance(triples, list):
        return None
    # If the counts differ, no logprob can be matched to a token: all are unknown.
    return [logprob_of(triple[0]) for triple in triples] if len(triples) == num_tokens else [UNKNOWN] * num_tokens
