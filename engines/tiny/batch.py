"""Rows decoded together: one key-value cache, padded on the left; rows join and leave it between two steps.

The next token of each row is sampled independently of the other rows.
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
"""A namespace (SGLang's ``extra_key``) and a prompt in it."""
Pairs = list[tuple[Any, Any]]
"""Keys and values of each layer, each ``[rows, heads, length, head size]``."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that was read: its cache (one row), and the logits of the next token, ``[vocabulary]``."""

    pairs: Pairs
    num_tokens: int
    logits: Any


class PrefillCache:
    """The prompts read last, up to ``max_tokens`` tokens in total. The newest is always kept."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: dict[PromptKey, Prefill] = {}
        self._num_tokens = 0

    def get(self, key: PromptKey) -> Prefill | None:
        """Return the prompt's prefill if it is cached."""
        return self._kept.get(key)

    def put(self, key: PromptKey, prefill: Prefill) -> Prefill:
        """Add and return a prefill, evicting the oldest ones."""
        self._kept[key] = prefill
        self._num_tokens += prefill.num_tokens
        # Dicts keep insertion order, so the first entry is the oldest.
        while self._num_tokens > self._max_tokens and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._num_tokens -= len(oldest[1])
        return prefill

    def clear(self) -> None:
        """Remove all prefills."""
        self._kept.clear()
        self._num_tokens = 0


class RunningBatch(Generic[RowT]):
    """The rows in flight. A row's results depend only on its own tokens, up to float32 rounding."""

    def __init__(self, model: LoadedModel) -> None:
        self._torch = require("torch")
        self._cache_type = require("transformers").DynamicCache
        self._network = model.network
        self._pairs: Pairs = []
        self._lengths: list[int] = []
        self.rows: list[RowT] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache, excluding padding."""
        return sum(self._lengths)

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """Read one prompt alone, so that its results do not depend on the rows in flight."""
        return self._read(prompt_ids, 1)[0]

    def scored_prefill(self, prompt_ids: Sequence[int], start: int) -> tuple[Prefill, tuple[float, ...]]:
        """Read one prompt; also returns the logprobs of its tokens after ``start``, at temperature 1."""
        prefill, logits = self._read(prompt_ids, len(prompt_ids) - start)
        logprobs = self._torch.log_softmax(logits[:-1].float(), dim=-1)
        tokens = self._torch.tensor(list(prompt_ids[start + 1 :]), dtype=self._torch.long)
        return prefill, tuple(logprobs.gather(1, tokens[:, None]).squeeze(1).tolist())

    def _read(self, prompt_ids: Sequence[int], num_logits: int) -> tuple[Prefill, Any]:
        # A separate cache: batching it with a padded row would change the last bits of the results.
        cache = self._cache_type()
        ids = self._torch.tensor([list(prompt_ids)])
        logits = self._network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=num_logits).logits
        return Prefill(_pairs_of(cache), len(prompt_ids), logits[0, -1]), logits[0]

    def join(self, added: Sequence[tuple[RowT, Prefill]]) -> None:
        """Add rows that continue after their prompts; copies the cache once. Rows may share a prefill."""
        if not added:
            return
        parts = [self._pairs] if self.rows else []
        parts += [prefill.pairs for _, prefill in added]
        self.rows.extend(row for row, _ in added)
        self._lengths.extend(prefill.num_tokens for _, prefill in added)
        length = max(self._lengths)
        self._pairs = [self._stack(layer, length) for layer in zip(*parts, strict=True)]

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all rows except ``kept``, and the padding that only the dropped rows needed."""
        self.rows = [self.rows[row] for row in kept]
        self._lengths = [self._lengths[row] for row in kept]
        if not kept:
            self._pairs = []
            return
        # Padding is on the left, so the newest tokens of every row end in one column.
        index, length = self._torch.tensor(list(kept)), max(self._lengths)
        self._pairs = [(keys[index, :, -length:], values[index, :, -length:]) for keys, values in self._pairs]

    def step(self, token_ids: Sequence[int]) -> Any:
        """Feed each row its newest token; returns the logits of the next ones, ``[rows, vocabulary]``."""
        torch = self._torch
        lengths = torch.tensor(self._lengths)
        cache = self._cache_type(self._pairs)
        logits = self._network(
            input_ids=torch.tensor(list(token_ids))[:, None],
            attention_mask=self._mask(lengths),
            # The row's own token count, not its column, because left padding would shift the positions.
            position_ids=lengths[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._pairs = _pairs_of(cache)
        self._lengths = [length + 1 for length in self._lengths]
        return logits[:, -1]

    def _mask(self, lengths: Any) -> Any:
        """Return 1 where a row has a token, including the one being fed: ``[rows, longest + 1]``."""
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
    """Sample one token per row from ``logits`` ``[rows, vocabulary]``.

    Logprobs are those at the row's temperature before top-p and top-k, as SGLang reports them.
    """
    torch = require("torch")
    # Greedy rows may have temperature 0: they are scaled by 1, which does not change their most probable token.
    scales = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32)
    logprobs = torch.log_softmax(logits.float() / scales[:, None], dim=-1)
    tokens = _draw(logprobs, params, dice)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    tops = [_most_probable(row, count) for row, count in zip(logprobs, num_top, strict=True)]
    return [TokenChoice(*choice) for choice in zip(tokens.tolist(), chosen.tolist(), tops, strict=True)]


def _draw(logprobs: Any, params: Sequence[SamplingParams], dice: Sequence[random.Random]) -> Any:
    """Sample by inverting each row's distribution function in vocabulary order, in float64.

    Filters do not change that order, so the token depends on the row alone.
    """
    torch = require("torch")
    probabilities = logprobs.double().exp()
    for row, param in enumerate(params):
        if param.is_filtered:
            probabilities[row] = _filter(probabilities[row], param)
    heights = probabilities.cumsum(dim=-1)
    # Scaled by the sum, because filters and rounding make the heights end below 1.
    points = torch.tensor([die.random() for die in dice], dtype=torch.float64) * heights[:, -1]
    drawn = torch.searchsorted(heights, points[:, None], right=True).squeeze(1).clamp(max=logprobs.shape[1] - 1)
    greedy = torch.tensor([p.is_greedy for p in params])
    return torch.where(greedy, logprobs.argmax(dim=-1), drawn)


def _filter(probabilities: Any, params: SamplingParams) -> Any:
    """Zero the tokens that top-k, then top-p of the rest, excludes; the most probable token always stays."""
    torch = require("torch")
    values, order = probabilities.sort(descending=True, stable=True)
    if params.top_k > 0:
        values[params.top_k :] = 0
    values = values / values.sum()
    before = values.cumsum(dim=-1) - values
    # Starts at 1, because rounding of the sums must not exclude the most probable token.
    values[1:][before[1:] >= params.top_p] = 0
    return torch.zeros_like(probabilities).scatter(0, order, values)


def _most_probable(logprobs: Any, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, tokens = logprobs.topk(min(count, logprobs.shape[0]))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))
