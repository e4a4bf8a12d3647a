"""Picking the next token of each row of a batch, independently of the rows beside it."""

import random
from collections.abc import Sequence
from typing import Any

from forebay.engines.fake_sglang.calls import SamplingParams, TokenChoice
from forebay.engines.tiny.extra import require


def new_dice(seed: int | None, index: int) -> random.Random:
    """The random numbers of choice ``index`` of a call: the same for the same seed, different for each choice."""
    return random.Random() if seed is None else random.Random(f"{seed}/{index}")


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
