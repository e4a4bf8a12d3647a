"""Build the token fields of a sample from the turns on one branch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.core.weight_versions import number_of
from forebay.engines.capture.token_tree import Node
from forebay.engines.capture.turn import SamplingSpan, Source, Turn, VersionSpan


class TokenSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens ``[start, end)`` of a sample, which share one source and one weight version."""

    source: Source
    start: int
    end: int
    weight_version: int | None = None
    mixed_kv: bool = False
    sampling: dict[str, Any] | None = None
    """How the tokens were sampled (a ``Sampling``): empty for neutral parameters, None if unknown."""
    model: str = ""
    """The model the call requested, and its adapter."""
    adapter: str = ""


class CapturedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to train on. ``tokens``, ``loss_mask``, ``logprobs`` and ``token_spans`` cover the same positions.

    ``loss_mask`` is 1 for tokens that were sampled in this rollout and are trained on in this sample. ``logprobs`` are
    0 for tokens that were not sampled or whose logprob is unknown; the latter are not trained on. ``tokens`` is None if
    the engine returned no ids, and ``logprobs`` is None if none were requested.
    """

    messages: list[dict[str, Any]]
    finish_reason: str
    weight_versions: list[int]
    """Without duplicates, in the order of first use; non-numeric versions are left out."""
    tokens: list[int] | None = None
    loss_mask: list[int] | None = None
    logprobs: list[float] | None = None
    token_spans: list[TokenSpan] = []
    asked_models: list[str] = []
    """The models the rollout's calls requested, if unusual; only the main sample has them."""
    image_options: dict[str, Any] = {}
    """The ``mm_processor_kwargs`` of its last call."""
    rows: dict[str, Any] = {}
    """The fields ``parts`` (``NamedPart``, which samples of one rollout share) and ``arrays``."""

    def fields(self) -> dict[str, Any]:
        """Return the fields to add to a sample, as JSON values."""
        fields: dict[str, Any] = {"messages": self.messages}
        if len(self.weight_versions) == 1:
            fields["weight_version"] = self.weight_versions[0]
        elif self.weight_versions:
            fields["weight_versions"] = self.weight_versions
        if self.asked_models:
            fields["asked_models"] = self.asked_models
        if self.image_options:
            fields["mm_processor_kwargs"] = self.image_options
        if self.tokens is None:
            return {**fields, "retokenized": True}
        fields |= {"tokens": self.tokens, "loss_mask": self.loss_mask}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return {**fields, "token_spans": msgspec.to_builtins(self.token_spans), **self.rows}


class Recorded(Protocol):
    """The record of a rollout's engine calls: a ``Trajectory``, or the result another process sent."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def sample_fields(self) -> Sequence[dict[str, Any]]:
        """Return the fields of each sample: forks first, the main sample last."""


def sample_without_tokens(turns: Sequence[Turn]) -> CapturedSample:
    """Return the sample of a rollout with unknown token ids: messages and weight versions only."""
    last = turns[-1]
    versions = [name for turn in turns for name in _version_names(turn)]
    return CapturedSample(
        messages=[*last.messages, last.reply], finish_reason=last.finish_reason, weight_versions=_numbers(versions)
    )


def sample_of(leaf: Node, claimed: dict[Node, int]) -> CapturedSample:
    """Return the sample of the branch that ends with ``leaf``.

    ``claimed`` maps a node to the end of its sampled tokens that other samples train on; this sample's are added.
    """
    path = leaf.path()
    cuts = [*(node.kept for node in path[1:]), leaf.end]
    parts = list(zip(path, cuts, strict=True))
    has_logprobs = any(node.turn.logprobs is not None for node in path)
    return CapturedSample(
        messages=[*leaf.turn.messages, leaf.turn.reply],
        finish_reason=leaf.turn.finish_reason,
        weight_versions=_numbers(name for node in path for name in _version_names(node.turn)),
        tokens=list(leaf.sequence()),
        loss_mask=[bit for node, cut in parts for bit in _mask(node, cut, claimed, needs_logprobs=has_logprobs)],
        logprobs=_logprobs(parts) if has_logprobs else None,
        token_spans=_joined(span for node, cut in parts for span in _spans(node, cut)),
        image_options=leaf.turn.image_options,
    )


def _mask(node: Node, cut: int, claimed: dict[Node, int], *, needs_logprobs: bool) -> list[int]:
    start = node.sampled_start
    free = max(claimed.get(node, start), start) if node.turn.is_policys else cut
    claimed[node] = max(free, cut)
    logprobs = node.logprobs
    # A token with an unknown logprob cannot be trained on. A sample without any logprobs leaves them to the trainer.
    is_known = [not needs_logprobs or not math.isnan(logprobs[at - start]) for at in range(start, cut)]
    return [0] * len(node.prompt) + [int(start + at >= free and known) for at, known in enumerate(is_known)]


def _logprobs(parts: Sequence[tuple[Node, int]]) -> list[float]:
    values: list[float] = []
    for node, cut in parts:
        sampled = node.logprobs[: cut - node.sampled_start]
        values += [0.0] * len(node.prompt) + [0.0 if math.isnan(value) else value for value in sampled]
    return values


def _spans(node: Node, cut: int) -> Iterator[TokenSpan]:
    """Yield the spans of one node, at their positions in the sample."""
    start = node.sampled_start
    yield TokenSpan(_prompt_source(node), node.kept, start)
    turn = node.turn
    for span in turn.versions or [VersionSpan("", 0, len(node.sampled))]:
        numbers = _numbers([span.version])
        version = numbers[0] if numbers else None
        for piece in _by_sampling(turn.sampling, span):
            place = (start + piece.start, min(start + piece.end, cut))
            yield TokenSpan("llm", *place, version, turn.is_kv_mixed, piece.sampling, turn.model, turn.adapter)


class _Piece(NamedTuple):
    start: int
    end: int
    sampling: dict[str, Any] | None


def _by_sampling(spans: Sequence[SamplingSpan], version: VersionSpan) -> Iterator[_Piece]:
    """Split the tokens of one weight version by their sampling parameters, without gaps."""
    at = version.start
    for span in spans:
        start, end = max(at, span.start), min(span.end, version.end)
        if start < end:
            yield _Piece(at, start, None)
            yield _Piece(start, end, span.sampling)
            at = end
    yield _Piece(at, version.end, None)


def _prompt_source(node: Node) -> Source:
    parent = node.parent
    if parent is None or node.kept < parent.end:
        return "environment"
    new = node.turn.messages[len(parent.turn.messages) + 1 :]
    # "tool" if the prompt adds only tool results; the template tokens around them count as part of them.
    return "tool" if new and all(message.get("role") == "tool" for message in new) else "environment"


def _joined(spans: Iterable[TokenSpan]) -> list[TokenSpan]:
    """Drop empty spans and merge neighbours with equal values."""
    joined: list[TokenSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and msgspec.structs.replace(last, start=span.start, end=span.end) == span:
            joined[-1] = msgspec.structs.replace(last, end=max(last.end, span.end))
        elif span.end > span.start:
            joined.append(span)
    return joined


def _version_names(turn: Turn) -> list[str]:
    return [*(span.version for span in turn.versions), *turn.seen_versions]


def _numbers(versions: Iterable[str]) -> list[int]:
    numbers = map(number_of, versions)
    return list(dict.fromkeys(number for number in numbers if number is not None))
