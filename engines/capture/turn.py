"""The record of one engine call: the tokens it was given, the tokens it sampled, and which weights sampled them.

A turn that an abort has cut comes in parts, each with weights of its own; ``merge`` makes it one again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from forebay.engines.capture.engine_times import summed

T = TypeVar("T")

ABORTED = "abort"
"""The finish reason of a part that the engine cut off."""

Source = Literal["llm", "tool", "environment"]
"""Where tokens come from: sampled by the policy, a tool's result, or anything else that a prompt brings."""


class VersionSpan(msgspec.Struct, frozen=True):
    """The sampled tokens from ``start`` to before ``end`` stem from the weights called ``version``."""

    version: str
    start: int
    end: int


class SamplingSpan(msgspec.Struct, frozen=True):
    """How the sampled tokens from ``start`` to before ``end`` were drawn: a ``Sampling`` of ``sampling_params.py``."""

    sampling: dict[str, Any]
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one reply. Everything that a sample says about tokens is made of these.

    ``prompt_ids`` and ``sampled_ids`` are None where the engine gave no ids; ``sampled_ids`` hold the end token if one
    was sampled. ``logprobs`` (natural logarithms, one for each sampled token) is None where it gave none, and a NaN
    stands for that of a token that it left out.
    """

    messages: list[dict[str, Any]]
    """The messages of the request, as they were sent."""
    reply: dict[str, Any]
    """The assistant message."""
    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str = ""
    versions: list[VersionSpan] = []
    """By position in ``sampled_ids``, without gaps; empty where the engine gave none."""
    seen_versions: list[str] = []
    """The versions that were in use during a call of which the spans are not known (a stream across an update)."""
    sampling: list[SamplingSpan] = []
    """By position in ``sampled_ids``; nothing is known of tokens in a gap."""
    is_kv_mixed: bool = False
    """Whether weights changed in place below a cache that was kept: the logprobs belong to no one policy."""
    choice: int = 0
    """Which of the ``n`` choices of its call."""
    model: str = ""
    """The model that was asked for, and the LoRA ``adapter`` of it; "" where the call names none."""
    adapter: str = ""
    is_policys: bool = True
    """Whether its tokens may be trained on: not if the run has ``policy_models``, and none of them was asked for."""
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
    """The tools that were offered."""
    engine: dict[str, float] = {}
    """What the engine tells of its time: the ``Times`` of ``engine_times.py``."""


def continues(first: Turn, rest: Turn) -> bool:
    """Whether ``rest`` was asked to go on exactly where ``first`` was aborted."""
    if first.finish_reason != ABORTED or first.prompt_ids is None or first.sampled_ids is None:
        return False
    return rest.prompt_ids == first.prompt_ids + first.sampled_ids


def merge(first: Turn, rest: Turn) -> Turn:
    """The turn that was cut into ``first`` and ``rest``; how it ended, and where, is that of ``rest``.

    Tokens and versions are known if those of both parts are. A part without logprobs beside one that has them has one
    that is not known for each of its tokens. The reply's content is that of both parts one
    after the other, which is right where no character and no parsed tool call lies across the cut.
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
    )


def cut(turn: Turn, num_tokens: int) -> Turn:
    """The turn as if it had ended after ``num_tokens`` sampled tokens."""
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
    """Both lists; None if one is not known."""
    return None if first is None or rest is None else [*first, *rest]


def _content(turn: Turn) -> str:
    content = turn.reply.get("content")
    return content if isinstance(content, str) else ""


def _logprobs(first: Turn, rest: Turn) -> list[float] | None:
    if first.sampled_ids is None or rest.sampled_ids is None or (first.logprobs is None and rest.logprobs is None):
        return None
    return [*known_logprobs(first), *known_logprobs(rest)]


def known_logprobs(turn: Turn) -> list[float]:
    """One for each sampled token: NaN for all of a turn that has none."""
    return [math.nan] * len(turn.sampled_ids or ()) if turn.logprobs is None else turn.logprobs


def _sampling(first: Turn, rest: Turn) -> list[SamplingSpan]:
    """The spans of both parts by position in the whole; neighbours that say the same are one."""
    offset = len(first.sampled_ids or ())
    spans = list(first.sampling)
    for span in rest.sampling:
        moved = SamplingSpan(span.sampling, span.start + offset, span.end + offset)
        if spans and (spans[-1].sampling, spans[-1].end) == (moved.sampling, moved.start):
            moved = SamplingSpan(moved.sampling, spans.pop().start, moved.end)
        spans.append(moved)
    return spans


def _versions(first: Turn, rest: Turn) -> list[VersionSpan]:
    """The spans of both parts by position in the whole; none where a part with tokens has none."""
    if any(turn.sampled_ids and not turn.versions for turn in (first, rest)):
        return []
    offset = len(first.sampled_ids or ())
    moved = [VersionSpan(span.version, span.start + offset, span.end + offset) for span in rest.versions]
    return merged(span for span in [*first.versions, *moved] if span.end > span.start)


def merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Spans without gaps, where neighbours of one version are one."""
    made: list[VersionSpan] = []
    for span in spans:
        if made and made[-1].version == span.version:
            made[-1] = VersionSpan(span.version, made[-1].start, span.end)
        else:
            made.append(span)
    return made


def _usage(first: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    # The prompt was that of the first part; what the others read of it again was their price, not its length.
    prompt, counts = first.get("prompt_tokens"), [usage.get("completion_tokens") for usage in (first, rest)]
    if not isinstance(prompt, int) or not all(isinstance(count, int) for count in counts):
        return {**rest, **first}
    completion = sum(count for count in counts if isinstance(count, int))
    return {**rest, **first, "completion_tokens": completion, "total_tokens": prompt + completion}
