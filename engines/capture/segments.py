"""One turn out of the parts that an abort has cut it into, each with its own weights."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from forebay.engines.capture.turn import Turn, VersionSpan

T = TypeVar("T")

ABORTED = "abort"
"""The finish reason of a part that the engine cut off."""


def continues(first: Turn, rest: Turn) -> bool:
    """Whether ``rest`` was asked to go on exactly where ``first`` was aborted."""
    if first.finish_reason != ABORTED or first.prompt_ids is None or first.sampled_ids is None:
        return False
    return rest.prompt_ids == first.prompt_ids + first.sampled_ids


def merge(first: Turn, rest: Turn) -> Turn:
    """The turn that was cut into ``first`` and ``rest``; how it ended, and where, is what ``rest`` tells.

    Tokens, logprobs and versions are known if both parts tell theirs. The reply's content is that of both parts one
    after the other, which is right where no character and no parsed tool call lies across the cut.
    """
    sampled_ids = joined(first.sampled_ids, rest.sampled_ids)
    return msgspec.structs.replace(
        rest,
        messages=first.messages,
        reply={**rest.reply, "content": _content(first) + _content(rest)},
        prompt_ids=None if sampled_ids is None else first.prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=joined(first.logprobs, rest.logprobs),
        versions=_versions(first, rest),
        seen_versions=list(dict.fromkeys([*first.seen_versions, *rest.seen_versions])),
        is_kv_mixed=first.is_kv_mixed or rest.is_kv_mixed,
        choice=first.choice,
        began_s=first.began_s,
        first_token_s=first.first_token_s or rest.first_token_s,
        usage=_usage(first.usage, rest.usage),
        tools=first.tools,
    )


def cut(turn: Turn, num_tokens: int) -> Turn:
    """The turn as if it had ended after ``num_tokens`` sampled tokens."""
    kept = [span for span in turn.versions if span.start < num_tokens]
    return msgspec.structs.replace(
        turn,
        sampled_ids=None if turn.sampled_ids is None else turn.sampled_ids[:num_tokens],
        logprobs=None if turn.logprobs is None else turn.logprobs[:num_tokens],
        versions=[msgspec.structs.replace(span, end=min(span.end, num_tokens)) for span in kept],
    )


def joined(first: Sequence[T] | None, rest: Sequence[T] | None) -> list[T] | None:
    """Both lists; None if one is not known."""
    return None if first is None or rest is None else [*first, *rest]


def _content(turn: Turn) -> str:
    content = turn.reply.get("content")
    return content if isinstance(content, str) else ""


def _versions(first: Turn, rest: Turn) -> list[VersionSpan]:
    """The spans of both parts by position in the whole; none where a part with tokens tells none."""
    if any(turn.sampled_ids and not turn.versions for turn in (first, rest)):
        return []
    offset = len(first.sampled_ids or ())
    moved = [VersionSpan(span.version, span.start + offset, span.end + offset) for span in rest.versions]
    spans: list[VersionSpan] = []
    for span in [*first.versions, *moved]:
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
        elif span.end > span.start:
            spans.append(span)
    return spans


def _usage(first: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt was that of the first part; what the others read of it again was their price, not its length."""
    prompt, told = first.get("prompt_tokens"), [usage.get("completion_tokens") for usage in (first, rest)]
    if not isinstance(prompt, int) or not all(isinstance(count, int) for count in told):
        return {**rest, **first}
    completion = sum(count for count in told if isinstance(count, int))
    return {**rest, **first, "completion_tokens": completion, "total_tokens": prompt + completion}
