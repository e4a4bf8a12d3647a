"""The gateway's way to the server, by the private address of one run."""

import logging
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx

from forebay.core.backoff import Backoff
from forebay.gateway.engine_http import EngineReply
from forebay.web.replies import encode

logger = logging.getLogger(__name__)

WRITE_S = 120.0
"""The server itself waits up to a minute for room."""
FEED_WAIT_S = 25.0
JSON = {"content-type": "application/json"}
PASSED_ON = (b"content-type", b"retry-after")
GONE = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
"""Statuses that say: the run is over."""

Json = dict[str, Any]

AT_FIRST: Json = {"after": 0, "seen": -1, "wait_s": 0.0}


class BufferLink:
    """Enter it with ``async with``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process_id = f"gateway-{uuid.uuid4().hex}"

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(WRITE_S, connect=10.0), trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def write(self, content: bytes) -> EngineReply:
        """Write a sample as slime's client does; the server's answer, or a 503 if there is none."""
        try:
            reply = await self._http.post(f"{self._url}/buffer/write", content=content, headers=JSON)
        except httpx.TransportError as error:
            told = {"success": False, "message": f"the buffer does not answer: {error!r}", "data": None}
            return EngineReply(HTTPStatus.SERVICE_UNAVAILABLE, [(b"content-type", b"application/json")], encode(told))
        headers = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() in PASSED_ON]
        return EngineReply(reply.status_code, headers, reply.content)

    async def report(self, *, counts: Mapping[str, int] | None = None, waiting_for_engine: bool | None = None) -> None:
        """Tell how far the run is, as well as it can be told."""
        body: Json = {"waiting_for_engine": waiting_for_engine}
        if counts is not None:
            body |= {"counts": dict(counts), "process_id": self._process_id}
        try:
            reply = await self._http.post(f"{self._url}/progress", content=encode(body), headers=JSON)
        except httpx.TransportError as error:
            logger.warning("the server does not answer: %r", error)
        else:
            if reply.is_error:
                logger.warning("the server answers %d to a report: %s", reply.status_code, reply.text[:300])

    async def news(self, told: Json | None) -> Json | None:
        """What the server tells at once, or, after it ``told`` that, as soon as it is another; None if the run is gone.

        Closed groups, the step, and whether engines and deadlines stand still.
        """
        pause = Backoff()
        query = AT_FIRST if told is None else {"after": told["last"], "wait_s": FEED_WAIT_S, **_seen(told)}
        while True:
            try:
                reply = await self._http.get(f"{self._url}/closed_groups", params=query)
                if reply.status_code in GONE:
                    return None
                if reply.is_success:
                    news: Json = reply.json()
                    return news
            except httpx.TransportError as error:
                logger.warning("the server does not answer: %r", error)
            await pause.wait()


def _seen(told: Json) -> Json:
    """By which the server knows what would be new."""
    return {name: told[name] for name in ("seen", "paused", "still")}
