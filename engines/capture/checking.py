"""Check a sample against the engine: do its recorded tokens have its recorded logprobs?"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgspec

from forebay.core.errors import InvalidInput
from forebay.engines.capture.fill_gaps import score
from forebay.engines.router_workers import auth_headers, root_url

CHECK_TIMEOUT_S = 60.0


class SampleCheck(msgspec.Struct, frozen=True):
    """Difference between recorded logprobs and the engine's current logprobs for the same tokens."""

    num_tokens: int
    """Number of positions compared."""
    max_delta: float
    """Largest absolute difference, in nats; 0 if nothing was compared."""
    mean_delta: float
    num_unknown: int
    """Number of positions for which the engine has no logprob (the last id of its vocabulary)."""
    weight_version: str | None
    """Current weight version of the engine."""


async def check(
    engine_url: str,
    sample: Mapping[str, Any],
    *,
    weight_version: int | None = None,
    api_key: str | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> SampleCheck:
    """Feed a sample's ``tokens`` back through the SGLang server at ``engine_url`` (not a router).

    Compares every position with a ``loss_mask`` of 1. With ``weight_version``, only positions that ``token_spans``
    assigns to these weights. Meaningful for samples at temperature 1, while the engine still has the weights that
    sampled. Raises ``InvalidInput`` for a sample without tokens or logprobs, ``EngineError`` and ``TimeoutError``.
    """
    tokens, logprobs = sample.get("tokens"), sample.get("logprobs")
    if tokens is None or logprobs is None:
        raise InvalidInput("the sample has no tokens or no logprobs to compare", field="tokens")
    async with httpx.AsyncClient(headers=auth_headers(api_key), timeout=timeout_s) as http:
        scores = await score(http, root_url(engine_url), [int(token) for token in tokens])
    differences = [abs(float(logprobs[at]) - scores.logprobs[at]) for at in _compared(sample, weight_version)]
    deltas = [delta for delta in differences if not math.isnan(delta)]
    return SampleCheck(
        num_tokens=len(deltas),
        max_delta=max(deltas, default=0.0),
        mean_delta=sum(deltas) / len(deltas) if deltas else 0.0,
        num_unknown=len(differences) - len(deltas),
        weight_version=scores.weight_version,
    )


def _compared(sample: Mapping[str, Any], weight_version: int | None) -> Iterator[int]:
    wanted = range(len(sample["tokens"]))
    spans = [span for span in sample.get("token_spans") or [] if span.get("weight_version") == weight_version]
    ranges = [wanted] if weight_version is None else [range(span["start"], span["end"]) for span in spans]
    yield from (at for positions in ranges for at in positions if sample["loss_mask"][at])
