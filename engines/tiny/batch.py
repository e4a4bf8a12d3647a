"""Rows that are decoded together: one key-value cache, padded on the left, joined and left between two steps.

The next token of each is drawn independently of the rows beside it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forebay.engines.fake_sglang.calls import SamplingParams, TokenChoice
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.model import LoadedModel

RowT = TypeVar("RowT")

PromptKey = tuple[str | None, tuple[int, ...]]
"""A namespace (SGLang's ``extra_key``), and a prompt in it."""
Pairs = list[tuple[Any, Any]]
"""Per layer the keys and the values, each ``[rows, heads, length, head size]``."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that was read: its cache (one row), and the logits of the token after it, ``[vocabulary]``."""

    pairs: Pairs
    num_tokens: int
    logits: Any


class PrefillCache:
    """The prompts read last, up to ``max_tokens`` tokens of them. The newest is kept whatever its length."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: dict[PromptKey, Prefill] = {}
        self._num_tokens = 0

    def get(self, key: PromptKey) -> Prefill | None:
        """The prompt's prefill, if it is there."""
        return self._kept.get(key)

    def put(self, key: PromptKey, prefill: Prefill) -> Prefill:
        """Keep a prefill, and let the oldest go; gives it back."""
        self._kept[key] = prefill
        self._num_tokens += prefill.num_tokens
        # A dict gives its keys in the order in which they came: the first is the oldest.
        while self._num_tokens > self._max_tokens and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._num_tokens -= len(oldest[1])
        return prefill

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._num_tokens = 0


class RunningBatch(Generic[RowT]):
    """The rows in flight. A row's numbers depend on its own tokens only, up to float32 rounding."""

    def __init__(self, model: LoadedModel) -> None:
        self._torch = require("torch")
        self._cache_type = require("transformers").DynamicCache
        self._network = model.network
        self._pairs: Pairs = []
        self._lengths: list[int] = []
        self.rows: list[RowT] = []

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache, padding excluded."""
        return sum(self._lengths)

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """Read one prompt, alone: its numbers are then the same whatever is in flight."""
        return self._read(prompt_ids, 1)[0]

    def scored_prefill(self, prompt_ids: Sequence[int], start: int) -> tuple[Prefill, tuple[float, ...]]:
        """Read one prompt; also gives the logprobs of its tokens after ``start``, at temperature 1."""
        prefill, logits = self._read(prompt_ids, len(prompt_ids) - start)
        logprobs = self._torch.log_softmax(logits[:-1].float(), dim=-1)
        tokens = self._torch.tensor(list(prompt_ids[start + 1 :]), dtype=self._torch.long)
        return prefill, tuple(logprobs.gather(1, tokens[:, None]).squeeze(1).tolist())

    def _read(self, prompt_ids: Sequence[int], num_logits: int) -> tuple[Prefill, Any]:
        # A cache of its own: a padded row beside it would change the numbers in the last bits.
        cache = self._cache_type()
        ids = self._torch.tensor([list(prompt_ids)])
        logits = self._network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=num_logits).logits
        return Prefill(_pairs_of(cache), len(prompt_ids), logits[0, -1]), logits[0]

    def join(self, added: Sequence[tuple[RowT, Prefill]]) -> None:
        """Add rows that go on after their prompts, at the price of one copy of the cache. Rows may share a prefill."""
        if not added:
            return
        parts = [self._pairs] if self.rows else []
        parts += [prefill.pairs for _, prefill in added]
        self.rows.extend(row for row, _ in added)
        self._lengths.extend(prefill.num_tokens for _, prefill in added)
        length = max(self._lengths)
        self._pairs = [self._stack(layer, length) for layer in zip(*parts, strict=True)]

    def keep(self, kept: Sequence[int]) -> None:
        """Drop every row but these, and the padding that only the dropped ones needed."""
        self.rows = [self.rows[row] for row in kept]
        self._lengths = [self._lengths[row] for row in kept]
        if not kept:
            self._pairs = []
            return
        # Padding is on the left, so the newest tokens of every row end in one column.
        index, length = self._torch.tensor(list(kept)), max(self._lengths)
        self._pairs = [(keys[index, :, -length:], values[index, :, -length:]) for keys, values in self._pairs]

    def step(self, token_ids: Sequence[int]) -> Any:
        """Feed each row its newest token; gives the logits of the next ones, ``[rows, vocabulary]``."""
        torch = self._torch
        lengths = torch.tensor(self._lengths)
        cache = self._cache_type(self._pairs)
        logits = self._network(
            input_ids=torch.tensor(list(token_ids))[:, None],
            attention_mask=self._mask(lengths),
            # A row's own count of tokens, not its column: padding on the left would shift the positions.
            position_ids=lengths[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._pairs = _pairs_of(cache)
        self._lengths = [length + 1 for length in self._lengths]
        return logits[:, -1]

    def _mask(self, lengths: Any) -> Any:
        """1 where a row has a token, the one being fed included: ``[rows, longest + 1]``."""
        width = int(lengths.max()) + 1
        return (self._torch.arange(width)[None, :] >= width - 1 - lengths[:, None]).long()

    def _stack(self, layer: Sequence[tuple[Any, Any]], length: int) -> tuple[Any, Any]:
        keys, values = zip(*layer, strict=True)
        return self._padded(keys, length), self._padded(values, length)

    def _padded(self, parts: Sequence[Any], length: int) -> Any:
        pad = self._torch.nn.functional.pad
        return self._torch.cat([pad(part, (0, 0, length - part.shape[2], 0)) for part in parts])


def _pairs_of(cache: Any) -> Pairs:
    return [(layer[0], layer[1]) for layer in cache]


def pick_tokens(
    logits: Any, params: Sequence[SamplingParams], dice: Sequence[random.Random], num_top: Sequence[int]
) -> list[TokenChoice]:
    """Draw one token per row from ``logits`` ``[rows, vocabulary]``.

    A logprob is that of the distribution at the row's temperature before top-p and top-k, as SGLang reports it.
    """
    torch = require("torch")
    # Greedy rows have temperature 0: they are scaled by 1, and their token is the likeliest anyway.
    scales = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32)
    logprobs = torch.log_softmax(logits.float() / scales[:, None], dim=-1)
    tokens = _draw(logprobs, params, dice)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    tops = [_most_probable(row, count) for row, count in zip(logprobs, num_top, strict=True)]
    return [TokenChoice(*choice) for choice in zip(tokens.tolist(), chosen.tolist(), tops, strict=True)]


def _draw(logprobs: Any, params: Sequence[SamplingParams], dice: Sequence[random.Random]) -> Any:
    """Invert each row's distribution function in the order of the vocabulary, in float64.

    That order is the same with and without filters, so the token depends on the row alone.
    """
    torch = require("torch")
    probabilities = logprobs.double().exp()
    for row, param in enumerate(params):
        if param.is_filtered:
            probabilities[row] = _filter(probabilities[row], param)
    heights = probabilities.cumsum(dim=-1)
    # Scaled by the sum: with filters, and by rounding, the heights end below 1.
    points = torch.tensor([die.random() for die in dice], dtype=torch.float64) * heights[:, -1]
    drawn = torch.searchsorted(heights, points[:, None], right=True).squeeze(1).clamp(max=logprobs.shape[1] - 1)
    greedy = torch.tensor([p.is_greedy for p in params])
    return torch.where(greedy, logprobs.argmax(dim=-1), drawn)


def _filter(probabilities: Any, params: SamplingParams) -> Any:
    """Zero what top-k, then top-p of the rest, excludes; the most probable token always stays."""
    torch = require("torch")
    values, order = probabilities.sort(descending=True, stable=True)
    if params.top_k > 0:
        values[params.top_k :] = 0
    values = values / values.sum()
    before = values.cumsum(dim=-1) - values
    # The most probable one stays, whatever rounding has made of the sum before it.
    values[1:][before[1:] >= params.top_p] = 0
    return torch.zeros_like(probabilities).scatter(0, order, values)


def _most_probable(logprobs: Any, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, tokens = logprobs.topk(min(count, logprobs.shape[0]))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))
