"""The parts of a turn, from the fields in which engines tell them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from forebay.engines.capture.turn import VersionSpan

NOT_TOLD = float("nan")
"""Stands for the logprob of one token."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


def call_fields(
    body: Mapping[str, Any], *, rid: str | None = None, engine_url: str = "", began_s: float = 0.0
) -> dict[str, Any]:
    """What all turns of one call have in common."""
    return {
        "messages": _objects(body.get("messages")),
        "tools": _objects(body.get("tools")),
        "rid": rid or body.get("rid"),
        "engine_url": engine_url,
        "began_s": began_s,
    }


def _objects(told: object) -> list[dict[str, Any]]:
    """A client may send anything; the engine refuses what is wrong."""
    return [dict(each) for each in told if isinstance(each, Mapping)] if isinstance(told, list | tuple) else []


def token_ids(told: object) -> list[int] | None:
    """``told`` if it is a list of token ids."""
    try:
        return msgspec.convert(told, list[_TokenId])
    except msgspec.ValidationError:
        return None


def version_spans(metadata: object, num_tokens: int | None) -> list[VersionSpan]:
    """The spans in SGLang's ``metadata`` or ``meta_info``, over ``num_tokens`` sampled tokens (None: as told)."""
    if not isinstance(metadata, Mapping):
        return []
    told = metadata.get("weight_versions")
    if isinstance(told, list) and told:
        spans = [VersionSpan(str(span["version"]), span["start"], span["end"]) for span in told]
        return spans if num_tokens is None or spans[-1].end == num_tokens else _stretched(spans, num_tokens)
    name = metadata.get("weight_version")
    return [] if name is None else [VersionSpan(str(name), 0, num_tokens or 0)]


def _stretched(spans: Sequence[VersionSpan], num_tokens: int) -> list[VersionSpan]:
    """Spans that cover ``num_tokens`` exactly, whatever the engine counted."""
    kept = [span for span in spans if span.start < num_tokens] or list(spans[:1])
    return [*kept[:-1], VersionSpan(kept[-1].version, kept[-1].start, num_tokens)]


def is_kv_mixed(versions: Sequence[VersionSpan], meta_info: Mapping[str, Any]) -> bool:
    """Whether tokens were sampled over a cache that other weights had filled.

    Weights that change in mid-call do that unless the call was retracted, which computes its cache again.
    """
    return len(versions) > 1 and not meta_info.get("num_retractions")


def whole_logprobs(told: object, num_tokens: int) -> list[float] | None:
    """OpenAI's ``logprobs`` of one choice as numbers; None unless there is one for each token."""
    content = told.get("content") if isinstance(told, Mapping) else None
    if not isinstance(content, list) or len(content) != num_tokens:
        return None
    return [logprob_of(token.get("logprob")) for token in content]


def logprob_of(told: object) -> float:
    """A number as it is, anything else as not told."""
    return float(told) if isinstance(told, int | float) and not isinstance(told, bool) else NOT_TOLD


def sampled_fields(
    prompt_ids: list[int] | None, sampled_ids: list[int] | None, meta_info: Mapping[str, Any]
) -> dict[str, Any]:
    """What a turn says about its tokens; ``meta_info`` is SGLang's, or the ``metadata`` of a chat."""
    if prompt_ids is None or sampled_ids is None:
        return {"versions": version_spans(meta_info, None), "logprobs": None}
    versions = version_spans(meta_info, len(sampled_ids))
    triples = meta_info.get("output_token_logprobs")
    logprobs = [logprob_of(triple[0]) for triple in triples] if isinstance(triples, list) else []
    return {
        "prompt_ids": prompt_ids,
        "sampled_ids": sampled_ids,
        "logprobs": logprobs if triples is not None and len(logprobs) == len(sampled_ids) else None,
        "versions": versions,
        "is_kv_mixed": is_kv_mixed(versions, meta_info),
    }
