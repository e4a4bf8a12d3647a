"""The rows of a batch as plain values, with excluded tokens masked."""

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from forebay.client.model import Batch, Row
from forebay.client.tensors.ragged import Ragged, check_without_tokens
from forebay.client.tensors.token_filter import TokenFilter

UNSCORED = (
    "some tokens have no logprob and are not trained on: their logprobs were written as null or NaN or, with "
    "needs_logprobs, their samples have none"
)
CODES = {"tokens": "i", "logprobs": "f", "loss_mask": "B", "has_logprobs": "B", "offsets": "q"}
"""The arrays of a batch and their type codes in the module ``array``."""


def rows(
    samples: Batch | Sequence[Row],
    *,
    min_weight_version: int | None = None,
    only_policy_logprobs: bool = False,
    policy_temperature: float = 1.0,
    needs_logprobs: bool = False,
) -> list[Row]:
    """Return samples, of a batch or any others, for a trainer that makes its own tensors. Needs no torch.

    ``tokens``, ``loss_mask`` and ``logprobs`` are lists of one length, also for a batch read with ``as_tensors``. The
    parameters mask tokens as in ``collate``. ``logprobs`` are 0 for tokens that are not trained on, and None for a
    sample without logprobs. Samples without tokens are unchanged. The given samples are not modified.

    Raises ``InvalidInput`` in the same cases as ``collate``.
    """
    leaving_out = TokenFilter(min_weight_version, only_policy_logprobs, policy_temperature, needs_logprobs)
    ragged = Ragged.of(samples)
    given = samples if not isinstance(samples, Batch) else ragged.rows if samples.content else samples.rows
    made, num_unscored = [], 0
    for row, arrays in zip(given, _arrays(ragged), strict=True):
        own = dict(row)
        if not arrays["tokens"]:
            check_without_tokens(row)
        else:
            num_unscored += _leave_out(arrays, leaving_out, row)
            own |= {name: values for name, values in arrays.items() if values is not None}
        made.append(own)
    if num_unscored:
        warnings.warn(UNSCORED, RuntimeWarning, stacklevel=2)
    return made


def _arrays(ragged: Ragged) -> Iterator[dict[str, Any]]:
    """The arrays of each row as lists; ``logprobs`` is None for a row without."""
    flat = {name: ragged.numbers(name, code) for name, code in CODES.items()}
    for number, (start, end) in enumerate(pairwise(flat["offsets"])):
        own = {name: flat[name][start:end].tolist() for name in ("tokens", "loss_mask", "logprobs")}
        yield own if flat["has_logprobs"][number] else {**own, "logprobs": None}


def _leave_out(arrays: dict[str, Any], leaving_out: TokenFilter, row: Row) -> int:
    """Update the mask and the logprobs of one row. Returns the number of tokens masked for lack of a logprob."""
    mask, logprobs = arrays["loss_mask"], arrays["logprobs"]
    for start, end in leaving_out.left_out(row, len(mask)):
        mask[start:end] = [0] * (end - start)
    if logprobs is None:
        num_unscored = sum(map(bool, mask)) if leaving_out.needs_logprobs else 0
        arrays["loss_mask"] = [0] * len(mask) if num_unscored else mask
        return num_unscored
    unknown = [at for at, value in enumerate(logprobs) if not math.isfinite(value)]
    num_unscored = sum(bool(mask[at]) for at in unknown)
    for at in unknown:
        mask[at], logprobs[at] = 0, 0.0
    return num_unscored
