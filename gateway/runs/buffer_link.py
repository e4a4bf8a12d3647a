"""The gateway's calls to the server, at the private address of one run."""

import logging
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

from forebay.client.calls.async_transport import AsyncTransport
from forebay.client.calls.flow import ENDLESS_S, JSON_BODY, Call, Lost, ServerReply, answered, decoded, json_call
from forebay.core.sample import PLACE_HEADER, WRITER_HEADER
from forebay.web.replies import encode

logger = logging.getLogger(__name__)

WRITE_S = 120.0
"""Timeout of a write, during which the server itself waits up to a minute for room."""
FEED_WAIT_S = 25.0
GONE = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
"""Statuses that mean that the run is over."""
REPEATED = frozenset(range(HTTPStatus.MULTIPLE_CHOICES, 600)) - GONE
"""Statuses to retry: a restarting server may return anything before it knows the run."""

Json = dict[str, Any]

AT_FIRST: Json = {"after": 0, "seen": -1, "wait_s": 0.0}


class BufferLink:
    """Connection to the server. Enter it with ``async with``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process_id = f"gateway-{uuid.uuid4().hex}"

    async def __aenter__(self) -> Self:
        self._server = AsyncTransport(self._url, may_ask_proxy=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def write(self, content: bytes, writer: str = "") -> ServerReply:
        """Write a sample as slime's client does. Returns the server's reply, or a 503 if there is none.

        ``writer`` is the writer header that came with the sample.
        """
        headers = {**JSON_BODY, PLACE_HEADER: "1", **({WRITER_HEADER: writer} if writer else {})}
        # Sent only once: the generator retries by itself, as it would without a gateway.
        reply = await self._server.ask(Call("POST", "/buffer/write", content, headers, WRITE_S))
        if isinstance(reply, ServerReply):
            return reply
        body = {"success": False, "message": f"the buffer does not answer: {reply.reason}", "data": None}
        return ServerReply(HTTPStatus.SERVICE_UNAVAILABLE, {"content-type": "application/json"}, encode(body))

    async def report(self, *, counts: Mapping[str, int] | None = None, waiting_for_engine: bool | None = None) -> None:
        """Report the run's progress. The next report makes up for a lost one."""
        body: Json = {"waiting_for_engine": waiting_for_engine, "is_gateway": True}
        if counts is not None:
            # Counts of one process replace each other; those of a previous gateway process remain.
            body |= {"counts": dict(counts), "process_id": self._process_id}
        reply = await self._server.ask(json_call("POST", "/progress", body))
        if isinstance(reply, Lost):
            logger.warning("the server does not answer a report: %s", reply.reason)
        elif not reply.is_success and reply.status not in GONE:
            logger.warning(
                "the server answered %d to a report: %s", reply.status, reply.body[:300].decode(errors="replace")
            )

    async def news(self, before: Json | None) -> Json | None:
        """Return closed groups, the step, and whether engines and deadlines are paused; None if the run is gone.

        Returns at once, or, given the previous state ``before``, as soon as it has changed.
        """
        query = AT_FIRST
        if before is not None:
            seen = {name: before[name] for name in ("seen", "paused", "still")}  # lets the server detect changes
            query = {"after": before["last"], "wait_s": FEED_WAIT_S, **seen}
        call = Call("GET", "/closed_groups", query=query, timeout_s=WRITE_S)
        reply = await self._server.run(answered(call, ENDLESS_S, REPEATED))
        return None if reply.status in GONE else decoded(reply, call)
