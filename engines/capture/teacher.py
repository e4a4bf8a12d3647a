"""Logprobs of a sample's tokens under another model, the teacher, for on-policy distillation."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.core.parts import Rows, numpy_module
from forebay.engines.capture.fill_gaps import score
from forebay.engines.router_workers import admin_client, root_url

TIMEOUT_S = 120.0
"""Limit for one prefill of a whole sample."""


async def arrays(url: str, sample: Mapping[str, Any], *, top_k: int = 0, api_key: str | None = None) -> dict[str, Rows]:
    """Return the logprobs of a sample's tokens at the SGLang server ``url``, from one prefill.

    ``teacher_logprobs`` (float32, [tokens - 1]): row t is the logprob of token t at temperature 1, given all tokens
    before it, NaN if unknown; the first token has none. With ``top_k``, also the most probable ids at each of these
    positions: ``teacher_top_ids`` (int32) and ``teacher_top_logprobs`` (float32), [tokens - 1, top_k].

    Raises ``InvalidInput`` for a sample without tokens, ``EngineError``, ``EngineUnavailable``, ``TimeoutError``.
    """
    ids = list(sample.get("tokens") or ())
    if len(ids) < 2:
        raise InvalidInput(f"a teacher needs a sample of at least 2 tokens (got {len(ids)})", field="tokens")
    async with admin_client(api_key, TIMEOUT_S) as http:
        scores = await score(http, root_url(url), ids, num_top=top_k)
    numpy, tokens = numpy_module(), [(1, len(ids))]
    rows = {"teacher_logprobs": Rows(numpy.array(scores.logprobs[1:], "float32"), tokens)}
    if top_k:
        pairs = numpy.array(scores.top[1:], "float64").reshape(len(ids) - 1, top_k, 2)
        rows["teacher_top_logprobs"] = Rows(pairs[:, :, 0].astype("float32"), tokens)
        rows["teacher_top_ids"] = Rows(pairs[:, :, 1].astype("int32"), tokens)
    return rows
