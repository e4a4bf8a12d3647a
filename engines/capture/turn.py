"""The record of one engine call: the prompt tokens, the sampled tokens, and the weights that sampled them.

An aborted turn arrives in parts, each with its own weights; ``merge`` joins them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from forebay.engines.capture.engine_times import summed
from forebay.engines.capture.side_rows import RowPiece

T = TypeVar("T")

ABORTED = "abort"
"""Finish reason of a part that the engine aborted."""

Source = Literal["llm", "tool", "environment"]
"""Origin of tokens: sampled by the policy, a tool's result, or any other part of a prompt."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Weight version of the sampled tokens ``[start, end)``."""

    version: str
    start: int
    end: int


class SamplingSpan(msgspec.Struct, frozen=True):
    """Sampling parameters of the sampled tokens ``[start, end)``: a ``Sampling`` of ``sampling_params.py``."""

    sampling: dict[str, Any]
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one reply. Samples take all their token data from turns.

    ``prompt_ids`` and ``sampled_ids`` are None if the engine returned no ids; ``sampled_ids`` include the end token if
    one was sampled. ``logprobs`` (natural logarithms, one per sampled token) is None if the engine returned none; NaN
    marks a missing logprob.
    """

    messages: list[dict[str, Any]]
    """The messages of the request."""
    reply: dict[str, Any]
    """The assistant message."""
    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str = ""
    versions: list[VersionSpan] = []
    """By position in ``sampled_ids``, without gaps; empty if the engine reported none."""
    seen_versions: list[str] = []
    """Versions in use during a call whose spans are unknown (a stream across an update)."""
    sampling: list[SamplingSpan] = []
    """By position in ``sampled_ids``; parameters in a gap are unknown."""
    is_kv_mixed: bool = False
    """Whether weights changed in place while the cache was kept, so that the logprobs match no single policy."""
    choice: int = 0
    """Index among the ``n`` choices of its call."""
    model: str = ""
    """The requested model, and its LoRA ``adapter``; "" if the call names none."""
    adapter: str = ""
    is_policys: bool = True
    """Whether its tokens may be trained on: false if the run has ``policy_models`` and the call named none of them."""
    rid: str | None = None
    engine_url: str = ""
    began_s: float = 0.0
    """When the call was sent, in seconds since the Unix epoch."""
    first_token_s: float | None = None
    """When the first token arrived, for a streaming call; seconds since the Unix epoch."""
    ended_s: float = 0.0
    usage: dict[str, Any] = {}
    """The engine's own counts."""
    tools: list[dict[str, Any]] = []
    """The tools in the request."""
    image_options: dict[str, Any] = {}
    """The request's ``mm_processor_kwargs``: with them, a trainer expands images to the same tokens."""
    engine: dict[str, float] = {}
    """Timings reported by the engine: the ``Times`` of ``engine_times.py``."""
    arrays: dict[str, list[RowPiece]] = {}
    """Rows that the engine returned beside the tokens, by name and position in the whole sequence."""
    num_rerouted: int = 0
    """Tokens whose rows were dropped, because the engine had computed them again with other weights."""


def continues(first: Turn, rest: Turn) -> bool:
    """Whether ``rest`` continues exactly where ``first`` was aborted."""
    if first.finish_reason != ABORTED or first.prompt_ids is None or first.sampled_ids is None:
        return False
    return rest.prompt_ids == first.prompt_ids + first.sampled_ids


def merge(first: Turn, rest: Turn) -> Turn:
    """Join a turn that was cut into ``first`` and ``rest``; the finish reason and end time come from ``rest``.

    Tokens and versions are known if both parts have them. If only one part has logprobs, those of the other part are
    NaN. The content is the concatenation of both parts, which is correct if no character and no parsed tool call lies
    across the cut.
    """
    sampled_ids = joined(first.sampled_ids, rest.sampled_ids)
    return msgspec.structs.replace(
        rest,
        messages=first.messages,
        reply={**rest.reply, "content": _content(first) + _content(rest)},
        prompt_ids=None if sampled_ids is None else first.prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=_logprobs(first, rest),
        versions=_versions(first, rest),
        sampling=_sampling(first, rest),
        seen_versions=list(dict.fromkeys([*first.seen_versions, *rest.seen_versions])),
        is_kv_mixed=first.is_kv_mixed or rest.is_kv_mixed,
        choice=first.choice,
        began_s=first.began_s,
        first_token_s=first.first_token_s or rest.first_token_s,
        usage=_usage(first.usage, rest.usage),
        tools=first.tools,
        engine=summed(first.engine, rest.engine),
        arrays={name: [*first.arrays.get(name, ()), *rest.arrays.get(name, ())] for name in first.arrays | rest.arrays},
        num_rerouted=first.num_rerouted + rest.num_rerouted,
    )


def cut(turn: Turn, num_tokens: int) -> Turn:
    """Return the turn as if it had ended after ``num_tokens`` sampled tokens."""
    kept = [span for span in turn.versions if span.start < num_tokens]
    return msgspec.structs.replace(
        turn,
        sampled_ids=None if turn.sampled_ids is None else turn.sampled_ids[:num_tokens],
        logprobs=None if turn.logprobs is None else turn.logprobs[:num_tokens],
        versions=[msgspec.structs.replace(span, end=min(span.end, num_tokens)) for span in kept],
        sampling=[
            msgspec.structs.replace(span, end=min(span.end, num_tokens))
            for span in turn.sampling
            if span.start < num_tokens
        ],
    )


def joined(first: Sequence[T] | None, rest: Sequence[T] | None) -> list[T] | None:
    """Concatenate both lists; None if either is None."""
    return None if first is None or rest is None else [*first, *rest]


def _content(turn: Turn) -> str:
    content = turn.reply.get("content")
    return content if isinstance(content, str) else ""


def _logprobs(first: Turn, rest: Turn) -> list[float] | None:
    if first.sampled_ids is None or rest.sampled_ids is None or (first.logprobs is None and rest.logprobs is None):
        return None
    return [*known_logprobs(first), *known_logprobs(rest)]


def known_logprobs(turn: Turn) -> list[float]:
    """One logprob per sampled token; all NaN if the turn has none."""
    return [math.nan] * len(turn.sampled_ids or ()) if turn.logprobs is None else turn.logprobs


def _sampling(first: Turn, rest: Turn) -> list[SamplingSpan]:
    """Spans of both parts by position in the joined turn, with equal neighbours merged."""
    offset = len(first.sampled_ids or ())
    spans = list(first.sampling)
    for span in rest.sampling:
        moved = SamplingSpan(span.sampling, span.start + offset, span.end + offset)
        if spans and (spans[-1].sampling, spans[-1].end) == (moved.sampling, moved.start):
            moved = SamplingSpan(moved.sampling, spans.pop().start, moved.end)
        spans.append(moved)
    return spans


def _versions(first: Turn, rest: Turn) -> list[VersionSpan]:
    """Spans of both parts by position in the joined turn; empty if a part with tokens has none."""
    if any(turn.sampled_ids and not turn.versions for turn in (first, rest)):
        return []
    offset = len(first.sampled_ids or ())
    moved = [VersionSpan(span.version, span.start + offset, span.end + offset) for span in rest.versions]
    return merged(span for span in [*first.versions, *moved] if span.end > span.start)


def merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Merge neighbouring spans of one version. The spans must have no gaps."""
    made: list[VersionSpan] = []
    for span in spans:
        if made and made[-1].version == span.version:
            made[-1] = VersionSpan(span.version, made[-1].start, span.end)
        else:
            made.append(span)
    return made


def _usage(first: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    # The prompt length is that of the first part: later parts read the prompt again, which does not lengthen it.
    prompt, counts = first.get("prompt_tokens"), [usage.get("completion_tokens") for usage in (first, rest)]
    if not isinstance(prompt, int) or not all(isinstance(count, int) for count in counts):
        return {**rest, **first}
    completion = sum(count for count in counts if isinstance(count, int))
    return {**rest, **first, "completion_tokens": completion, "total_tokens": prompt + completion}
