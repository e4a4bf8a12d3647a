"""Routes of one sample's body: its stored bytes, and the texts of its tokens."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Response

from forebay.buffer.parts import KEEP_MORE, at_rest
from forebay.core.binary_sample import is_binary, unpack
from forebay.core.errors import BodiesGone, EngineError, EngineUnavailable, InvalidInput, NotFound
from forebay.core.records.rows import StoredSample
from forebay.engines import weight_updates
from forebay.engines.router_workers import admin_client
from forebay.server.engine_pauses import RunEngines
from forebay.server.services import Services, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}/groups/{group_id}", tags=["groups"])

DOWNLOAD = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
"""Headers of bytes that may be anything, so that no browser shows or runs them."""
ANSWER_S = 10.0
"""Seconds that an engine has to decode tokens."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def stored_body(run_id: str, group_id: str, uid: str, services: Server) -> bytes:
    """The body of the sample ``uid``. Raises ``NotFound``, ``BodiesGone`` and ``BodyUnreadable``."""
    services.buffer.get(run_id)
    store = services.buffer.store

    async def look_up() -> list[StoredSample]:
        stored = await store.samples(run_id, group_id)
        return [sample for sample in stored if sample.row.uid == uid and sample.row.is_sample]

    found = await at_rest(store, look_up)
    if not found:
        hint = f"GET /v1/runs/{run_id}/groups/{group_id} lists its samples"
        raise NotFound(f"group {group_id!r} has no sample {uid!r}", hint=hint)
    if not store.holds(found[0].location):
        raise BodiesGone([group_id], message=f"retention has removed the body of sample {uid!r}", hint=KEEP_MORE)
    [body] = await store.read([found[0].location])
    return body


Body = Annotated[bytes, Depends(stored_body)]


@router.get("/body", response_class=Response)
async def read_body(body: Body) -> Response:
    """The stored bytes of one sample: JSON, or a binary sample."""
    return Response(body, media_type="application/octet-stream", headers=DOWNLOAD)


@router.get("/token_texts")
async def token_texts(run_id: str, body: Body, services: Server) -> dict[str, Any]:
    """The text of each token id of one sample, as the run's engine decodes it alone."""
    engines = RunEngines.of(services.buffer.get(run_id).run)
    ids = await asyncio.to_thread(_token_ids, body)
    try:
        async with asyncio.timeout(ANSWER_S), admin_client(engines.api_key, ANSWER_S) as http:
            worker, *_ = await weight_updates.workers_of(http, engines.urls[:1])
            asked = {"tokens": [[each] for each in ids], "skip_special_tokens": False}
            texts = (await worker.post_json("/detokenize", asked) or {}).get("text")
    except TimeoutError:
        raise EngineUnavailable(f"{engines.urls[0]} did not decode the tokens within {ANSWER_S:g} s") from None
    if not isinstance(texts, list) or len(texts) != len(ids):
        raise EngineError(f"{worker.url} does not decode lists of tokens", hint="SGLang does, vLLM does not")
    return {"texts": dict(zip(map(str, ids), map(str, texts), strict=True))}


def _token_ids(body: bytes) -> list[int]:
    """The different token ids of a stored sample, sorted. Raises ``InvalidInput``."""
    if is_binary(body):
        return sorted(set(unpack(body).tokens.cast("i")))
    try:
        ids = msgspec.json.decode(body, type=_Tokens).tokens
    except (msgspec.MsgspecError, RecursionError):  # other writers may use the name otherwise
        ids = []
    if not ids:
        raise InvalidInput("the sample has no token ids", field="uid")
    return sorted(set(ids))
