"""slime's ``post``, which has no client before ``init_http_client``."""

from typing import Any

import httpx

_client: httpx.AsyncClient | None = None


def init_http_client(args: Any) -> None:
    global _client
    assert args.sglang_server_concurrency * args.rollout_num_gpus // args.rollout_num_gpus_per_engine > 0
    _client = httpx.AsyncClient(timeout=60)


async def post(url: str, payload: dict[str, Any]) -> Any:
    assert _client is not None
    reply = await _client.post(url, json=payload)
    reply.raise_for_status()
    return reply.json()
