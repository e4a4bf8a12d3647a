"""Which tokens of a sample are left out of the loss, in addition to those that its own mask leaves out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.sample import is_policys
from forebay.core.weight_versions import oldest_version

Stretch = tuple[int, int]
"""The tokens from the first position to before the second."""


class _Span(msgspec.Struct, frozen=True):
    """The tokens from ``start`` to before ``end``. What others may have written stands here as it came."""

    start: int
    end: int
    weight_version: Any = None
    mixed_kv: Any = None
    sampling: Any = None
    """What differs from neutral sampling parameters; None if the span does not tell."""

    @property
    def version(self) -> int | None:
        """The weights, if they have a number."""
        return oldest_version(self.weight_version)


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """What ``collate`` and ``rows`` are asked to leave out; ``collate`` says what each field means."""

    min_weight_version: int | None = None
    only_policy_logprobs: bool = False
    policy_temperature: float = 1.0
    needs_logprobs: bool = False

    @property
    def reads_spans(self) -> bool:
        """Whether anything of a sample but its arrays is looked at."""
        return self.min_weight_version is not None or self.only_policy_logprobs

    def left_out(self, row: Mapping[str, Any], num_tokens: int, *, has_spans: bool = True) -> list[Stretch]:
        """The tokens of a sample that are left out by what it tells of them.

        ``has_spans`` is False for tokens that were made anew: the sample's ``token_spans`` are not of them. Raises
        ``InvalidInput`` for spans that do not lie within the tokens.
        """
        if not self.reads_spans:
            return []
        # Spans count positions in the tokens of the engine; those that were made of the messages have others.
        spans = _spans(row, num_tokens) if has_spans and not row.get("retokenized") else []
        return [*self._older(row, spans, num_tokens), *self._not_the_policys(spans)]

    def _older(self, row: Mapping[str, Any], spans: Sequence[_Span], num_tokens: int) -> Iterator[Stretch]:
        if (least := self.min_weight_version) is None:
            return
        if not spans:
            # Without spans nobody knows which tokens are of the older ones: all are left out.
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
    """The spans of a sample; none if it has none. Raises ``InvalidInput`` if they do not lie within its tokens."""
    if not (given := row.get("token_spans")):
        return []
    uid = row.get("uid")
    try:
        spans = msgspec.convert(given, list[_Span])
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the token_spans of sample {uid!r} cannot be read: {error}", field="token_spans") from None
    if any(not 0 <= span.start <= span.end <= num_tokens for span in spans):
        hint = "a span has start and end, by position in tokens"
        raise InvalidInput(f"token_spans of sample {uid!r} exceed its tokens", hint=hint, field="token_spans")
    return spans
