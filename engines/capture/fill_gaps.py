"""Ask an SGLang server for what a stream omits: its weight version and missing logprobs."""

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from forebay.core.errors import EngineError
from forebay.engines.capture.read_reply import UNKNOWN, logprob_of
from forebay.engines.capture.read_rows import ROUTED
from forebay.engines.capture.sampling_params import are_scores
from forebay.engines.capture.turn import Turn, VersionSpan, known_logprobs
from forebay.engines.read_json import unreadable
from forebay.engines.router_workers import WorkerAdmin

logger = logging.getLogger(__name__)

AGREEMENT = 0.05
"""Maximum difference, in nats, between fetched and streamed logprobs for the fetched ones to be accepted.

Logprobs at another temperature differ by far more; rounding in bfloat16 stays below it.
"""


async def complete(
    http: httpx.AsyncClient,
    url: str,
    turns: Sequence[Turn],
    versions: tuple[str | None, str | None],
    *,
    extra_key: str | None = None,
) -> list[Turn]:
    """Return the turns of one stream from the server at ``url``, with versions and missing logprobs filled in.

    ``versions`` are the server's weight versions before the call and after it. If they differ, both become
    ``seen_versions`` and nothing is filled in. Logprobs are fetched at temperature 1, for turns sampled at 1. If a
    turn's temperature is unknown, they are used only if they agree with the streamed ones. ``extra_key`` is the
    request's. Server failures never raise.
    """
    before, after = versions
    if before is None or after != before:
        # It is unknown which weights sampled which token, so nothing can be scored.
        seen = [version for version in versions if version is not None]
        return [_seen(turn, seen) for turn in turns]
    spans = [turn.versions or [VersionSpan(before, 0, len(turn.sampled_ids or ()))] for turn in turns]
    known = [msgspec.structs.replace(turn, versions=each) for turn, each in zip(turns, spans, strict=True)]
    return [await _filled(http, url, turn, extra_key=extra_key) for turn in known]


def _seen(turn: Turn, versions: list[str]) -> Turn:
    is_known = turn.versions or turn.sampled_ids == []
    if is_known:
        return turn
    # The engine may have computed its rows again with the new weights: a stream does not say so.
    lost = sum(piece.end - piece.start for piece in turn.arrays.get(ROUTED, ())) if len(versions) > 1 else 0
    kept = {name: pieces for name, pieces in turn.arrays.items() if name != ROUTED or not lost}
    return msgspec.structs.replace(
        turn, seen_versions=versions, is_kv_mixed=len(versions) > 1, arrays=kept, num_rerouted=turn.num_rerouted + lost
    )


async def _filled(http: httpx.AsyncClient, url: str, turn: Turn, *, extra_key: str | None) -> Turn:
    is_plain = are_scores(turn.sampling[0].sampling) if turn.sampling else None
    if turn.prompt_ids is None or not turn.sampled_ids or is_plain is False:
        return turn
    streamed = known_logprobs(turn)
    if not any(map(math.isnan, streamed)):
        return turn
    try:
        # Start one token early: SGLang returns no logprob for the first token of the range.
        ids, start = turn.prompt_ids + turn.sampled_ids, len(turn.prompt_ids) - 1
        scores = await score(http, url, ids, start=start, extra_key=extra_key)
    except (EngineError, TimeoutError) as error:
        logger.info("logprobs missing from a stream could not be fetched: %s", type(error).__name__)
        return turn
    asked = scores.logprobs[1:]
    # The weights may have changed since, or the unknown temperature was not 1.
    if scores.weight_version not in {turn.versions[0].version, None} or not _agree(
        streamed, asked, is_trusted=is_plain is True
    ):
        logger.info("logprobs missing from a stream stay unknown: the fetched logprobs disagree with the streamed ones")
        return turn
    filled = [other if math.isnan(one) else one for one, other in zip(streamed, asked, strict=True)]
    return msgspec.structs.replace(turn, logprobs=filled)


def _agree(streamed: Sequence[float], asked: Sequence[float], *, is_trusted: bool) -> bool:
    """Whether the logprobs are close wherever both are known; ``is_trusted`` if there is nothing to compare."""
    differences = [abs(one - other) for one, other in zip(streamed, asked, strict=True)]
    known = [difference for difference in differences if not math.isnan(difference)]
    return max(known) <= AGREEMENT if known else is_trusted


class Scores(msgspec.Struct, frozen=True):
    """``logprobs[i]`` is the logprob of token ``start + i`` given all tokens before it.

    NaN for the very first token, and for the last id of the vocabulary, for which SGLang (0.5.23) returns id 0.
    """

    start: int
    logprobs: list[float]
    weight_version: str | None
    top: list[list[tuple[float, int]]] = []
    """The most probable ids at each of these positions, if they were asked for, with their logprobs."""


async def prefill(
    http: httpx.AsyncClient, url: str, ids: Sequence[int], extra_key: str | None, **asked: object
) -> Mapping[str, Any]:
    """Return ``meta_info`` of a call that only reads ``ids``, with the fields ``asked``. Raises as ``score`` does."""
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    key = {} if extra_key is None else {"extra_key": extra_key}
    reply = await WorkerAdmin(http, url).post_json("/generate", {**body, **key, **asked})
    if reply is None:
        raise EngineError(f"{url} has no /generate", status_code=HTTPStatus.NOT_FOUND)
    if not isinstance(meta_info := reply.get("meta_info"), Mapping):
        raise unreadable(reply, f"reply of {url}/generate", TypeError("it has no meta_info"))
    return meta_info


async def score(
    http: httpx.AsyncClient,
    url: str,
    ids: Sequence[int],
    *,
    start: int = 0,
    extra_key: str | None = None,
    num_top: int = 0,
) -> Scores:
    """Return logprobs of ``ids[start:]`` at temperature 1 under the current weights of the server at ``url``.

    ``extra_key`` is the key of the call that left ``ids`` in the cache, if it had one.
    Raises ``EngineError`` if the server cannot score, ``TimeoutError``, and ``EngineUnavailable``.
    """
    asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": num_top}
    meta_info = await prefill(http, url, ids, extra_key, **asked)
    try:
        scored = [(token_id, logprob_of(value)) for value, token_id, *_ in meta_info["input_token_logprobs"]]
        pairs = list(zip(ids[start:], scored, strict=True))
        rows = meta_info["input_top_logprobs"] if num_top else ()
        top = [[(float(value), int(token_id)) for value, token_id, *_ in row or ()] for row in rows]
        if num_top and [len(row) for row in top[1:]] != [num_top] * (len(pairs) - 1):
            raise ValueError(f"input_top_logprobs has not {num_top} ids for each token")
    except (LookupError, TypeError, ValueError) as error:
        raise unreadable(meta_info, f"logprobs of the input at {url}/generate", error) from error
    logprobs = [value if asked == token_id else UNKNOWN for asked, (token_id, value) in pairs]
    version = meta_info.get("weight_version")
    return Scores(start, logprobs, None if version is None else str(version), top)
