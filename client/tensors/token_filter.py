"""Tokens to exclude from the loss in addition to those that a sample's own mask excludes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.sample import is_policys
from forebay.core.weight_versions import oldest_version

Stretch = tuple[int, int]
"""Tokens from the first position up to, not including, the second."""


class _Span(msgspec.Struct, frozen=True):
    """The tokens from ``start`` up to, not including, ``end``. The other fields are not validated."""

    start: int
    end: int
    weight_version: Any = None
    mixed_kv: Any = None
    sampling: Any = None
    """The sampling parameters that are not neutral; None if the span does not state them."""

    @property
    def version(self) -> int | None:
        """The version of the weights, if it is a number."""
        return oldest_version(self.weight_version)


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """The tokens that ``collate`` and ``rows`` exclude; ``collate`` documents the fields."""

    min_weight_version: int | None = None
    only_policy_logprobs: bool = False
    policy_temperature: float = 1.0
    needs_logprobs: bool = False

    @property
    def reads_spans(self) -> bool:
        """Whether the filter reads fields of a sample other than its arrays."""
        return self.min_weight_version is not None or self.only_policy_logprobs

    def left_out(self, row: Mapping[str, Any], num_tokens: int, *, has_spans: bool = True) -> list[Stretch]:
        """The tokens of a sample to exclude.

        ``has_spans`` is False for tokens made from the messages, to which the sample's ``token_spans`` do not apply.
        Raises ``InvalidInput`` for spans that exceed the tokens.
        """
        if not self.reads_spans:
            return []
        # Spans count positions in the engine's tokens; tokens made from the messages have other positions.
        spans = _spans(row, num_tokens) if has_spans and not row.get("retokenized") else []
        return [*self._older(row, spans, num_tokens), *self._not_the_policys(spans)]

    def _older(self, row: Mapping[str, Any], spans: Sequence[_Span], num_tokens: int) -> Iterator[Stretch]:
        if (least := self.min_weight_version) is None:
            return
        if not spans:
            # Without spans it is unknown which tokens are from older weights: all are excluded.
            oldest = oldest_version(row.get("weight_version"), row.get("weight_versions"))
            if oldest is not None and oldest < least:
                yield 0, num_tokens
        for span in spans:
            if span.version is not None and span.version < least:
                yield span.start, span.end

    def _not_the_policys(self, spans: Sequence[_Span]) -> Iterator[Stretch]:
        if not self.only_policy_logprobs:
            return
        for span in spans:
            is_kept = span.sampling is None or is_policys(span.sampling, self.policy_temperature)
            if span.mixed_kv or not is_kept:
                yield span.start, span.end


def _spans(row: Mapping[str, Any], num_tokens: int) -> list[_Span]:
    """The spans of a sample, if any. Raises ``InvalidInput`` if they exceed its tokens."""
    if not (given := row.get("token_spans")):
        return []
    uid = row.get("uid")
    try:
        spans = msgspec.convert(given, list[_Span])
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the token_spans of sample {uid!r} are invalid: {error}", field="token_spans") from None
    if any(not 0 <= span.start <= span.end <= num_tokens for span in spans):
        hint = f"start and end of a span are positions in tokens, of which there are {num_tokens}"
        raise InvalidInput(f"the token_spans of sample {uid!r} exceed its tokens", hint=hint, field="token_spans")
    return spans
