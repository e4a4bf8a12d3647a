"""What a sample says about its tokens, from the turns on one branch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.core.weight_versions import number_of
from forebay.engines.capture.token_tree import Node
from forebay.engines.capture.turn import SamplingSpan, Source, Turn, VersionSpan


class TokenSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens from ``start`` to before ``end`` of a sample have one source, and one weight version."""

    source: Source
    start: int
    end: int
    weight_version: int | None = None
    mixed_kv: bool = False
    sampling: dict[str, Any] | None = None
    """How sampled tokens were drawn (a ``Sampling``): empty for neutral parameters; None if nobody knows."""
    model: str = ""
    """The model that was asked to sample them, and its adapter."""
    adapter: str = ""


class CapturedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to train on. ``tokens``, ``loss_mask``, ``logprobs`` and ``token_spans`` have one length.

    ``loss_mask`` is 1 where a token was sampled in this rollout and is trained on in this sample. ``logprobs`` are 0
    where no token was sampled, or where its logprob is unknown: then it is not trained on. ``tokens`` is None where the
    engine gave no ids, ``logprobs`` where none was asked for.
    """

    messages: list[dict[str, Any]]
    finish_reason: str
    weight_versions: list[int]
    """Each once, in the order of first use; versions that are no numbers are left out."""
    tokens: list[int] | None = None
    loss_mask: list[int] | None = None
    logprobs: list[float] | None = None
    token_spans: list[TokenSpan] = []
    asked_models: list[str] = []
    """What the rollout's calls asked for, if that needs a look; the main sample alone has it."""

    def fields(self) -> dict[str, Any]:
        """What a sample gets of it, as JSON values."""
        fields: dict[str, Any] = {"messages": self.messages}
        if len(self.weight_versions) == 1:
            fields["weight_version"] = self.weight_versions[0]
        elif self.weight_versions:
            fields["weight_versions"] = self.weight_versions
        if self.asked_models:
            fields["asked_models"] = self.asked_models
        if self.tokens is None:
            return {**fields, "retokenized": True}
        fields |= {"tokens": self.tokens, "loss_mask": self.loss_mask}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return {**fields, "token_spans": msgspec.to_builtins(self.token_spans)}


class Recorded(Protocol):
    """What a rollout's engine calls came to: a ``Trajectory``, or what another process says of one."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def sample_fields(self) -> Sequence[dict[str, Any]]:
        """What each sample gets of it: forks first, the main one last."""


def sample_without_tokens(turns: Sequence[Turn]) -> CapturedSample:
    """The sample of a rollout of which not all token ids are known: messages, and the weight versions."""
    last = turns[-1]
    versions = [name for turn in turns for name in _version_names(turn)]
    return CapturedSample(
        messages=[*last.messages, last.reply], finish_reason=last.finish_reason, weight_versions=_numbers(versions)
    )


def sample_of(leaf: Node, claimed: dict[Node, int]) -> CapturedSample:
    """The branch that ends with ``leaf``.

    ``claimed`` says up to where the sampled tokens of a node are trained on in other samples; this one's are added.
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
    )


def _mask(node: Node, cut: int, claimed: dict[Node, int], *, needs_logprobs: bool) -> list[int]:
    start = node.sampled_start
    free = max(claimed.get(node, start), start) if node.turn.is_policys else cut
    claimed[node] = max(free, cut)
    logprobs = node.logprobs
    # A token of which the logprob is unknown cannot be trained on; without any in the sample, the trainer has its own.
    is_known = [not needs_logprobs or not math.isnan(logprobs[at - start]) for at in range(start, cut)]
    return [0] * len(node.prompt) + [int(start + at >= free and known) for at, known in enumerate(is_known)]


def _logprobs(parts: Sequence[tuple[Node, int]]) -> list[float]:
    values: list[float] = []
    for node, cut in parts:
        sampled = node.logprobs[: cut - node.sampled_start]
        values += [0.0] * len(node.prompt) + [0.0 if math.isnan(value) else value for value in sampled]
    return values


def _spans(node: Node, cut: int) -> Iterator[TokenSpan]:
    """The spans of one node, at their places in the sample."""
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
    """The tokens of one weight version by how they were drawn, without gaps."""
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
    # A tool's result if that is all that the prompt brings; template tokens around it count with it.
    return "tool" if new and all(message.get("role") == "tool" for message in new) else "environment"


def _joined(spans: Iterable[TokenSpan]) -> list[TokenSpan]:
    """Without empty spans, and neighbours that say the same as one."""
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
