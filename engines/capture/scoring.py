"""Asking an SGLang server for the logprobs of given tokens."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from forebay.core.errors import EngineError
from forebay.engines.capture.parts import NOT_TOLD, logprob_of
from forebay.engines.wire import status_error, unreachable


class Scores(msgspec.Struct, frozen=True):
    """``logprobs[i]`` is that of token ``start + i`` after all before it.

    NaN for the very first token, and for the last id of the vocabulary: SGLang (0.5.23) tells id 0 in its place.
    """

    start: int
    logprobs: list[float]
    weight_version: str | None


async def score(
    http: httpx.AsyncClient, url: str, ids: Sequence[int], *, start: int = 0, extra_key: str | None = None
) -> Scores:
    """The logprobs of ``ids[start:]`` under the weights that the server at ``url`` has now, at temperature 1.

    ``extra_key`` is that of the call which has left ``ids`` in the cache, if it had one.
    Raises ``EngineError`` for a server that cannot tell them, ``TimeoutError``, and ``EngineUnavailable``.
    """
    body: dict[str, Any] = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    if extra_key is not None:
        body["extra_key"] = extra_key
    reply = await _posted(http, url, body)
    try:
        meta_info = msgspec.json.decode(reply)["meta_info"]
        told = [(token_id, logprob_of(value)) for value, token_id, *_ in meta_info["input_token_logprobs"]]
        pairs = list(zip(ids[start:], told, strict=True))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(f"{url}/generate tells no input_token_logprobs: {reply[:200]!r}", status_code=200) from error
    logprobs = [value if asked == token_id else NOT_TOLD for asked, (token_id, value) in pairs]
    version = meta_info.get("weight_version")
    return Scores(start, logprobs, None if version is None else str(version))


async def _posted(http: httpx.AsyncClient, url: str, body: object) -> bytes:
    try:
        reply = await http.post(f"{url}/generate", json=body)
    except httpx.TimeoutException as error:
        raise TimeoutError(f"{url}/generate did not answer in time") from error
    except httpx.TransportError as error:
        raise unreachable(url, error) from error
    if reply.status_code != HTTPStatus.OK:
        raise status_error(url, reply.status_code, reply.content)
    return reply.content
