"""Leaving tokens of an older policy out of the loss."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.weight_versions import oldest_version

if TYPE_CHECKING:
    import torch


class _Span(msgspec.Struct):
    start: int
    end: int
    weight_version: Any = None


def without_older(
    loss_mask: "torch.Tensor", row: Mapping[str, Any], min_version: int, *, has_spans: bool = True
) -> "torch.Tensor":
    """``loss_mask`` [T] of a sample with 0 for tokens of weights older than ``min_version``; itself if there are none.

    ``has_spans`` is False for tokens that were made anew: the sample's ``token_spans`` are not of them. Raises
    ``InvalidInput`` for spans that do not lie within the tokens.
    """
    # Spans count positions in the tokens of the engine; those that were made of the messages have others.
    spans = row.get("token_spans") if has_spans and not row.get("retokenized") else None
    older = list(_older(row, spans, len(loss_mask), min_version))
    if not older:
        return loss_mask
    masked = loss_mask.clone()  # what was received is read-only
    for start, end in older:
        masked[start:end] = 0
    return masked


def _older(row: Mapping[str, Any], spans: object, num_tokens: int, min_version: int) -> Iterator[tuple[int, int]]:
    if not spans:
        # Without spans nobody knows which tokens are of the older ones: all are left out.
        oldest = oldest_version(row.get("weight_version"), row.get("weight_versions"))
        if oldest is not None and oldest < min_version:
            yield 0, num_tokens
        return
    for span in _checked(spans, row.get("uid"), num_tokens):
        version = oldest_version(span.weight_version)
        if version is not None and version < min_version:
            yield span.start, span.end


def _checked(spans: object, uid: object, num_tokens: int) -> list[_Span]:
    try:
        checked = msgspec.convert(spans, list[_Span])
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the token_spans of sample {uid!r} cannot be read: {error}", field="token_spans") from None
    if any(not 0 <= span.start <= span.end <= num_tokens for span in checked):
        hint = "a span has start and end, by position in tokens"
        raise InvalidInput(f"token_spans of sample {uid!r} exceed its tokens", hint=hint, field="token_spans")
    return checked
