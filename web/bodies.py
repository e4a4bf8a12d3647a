"""Request bodies: read within limits, one for each and one for all that are in memory."""

import asyncio
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.core.errors import BodyTooLarge, BufferFull
from forebay.web.connection_limits import RequestStalled
from forebay.web.http_protocol import connection_of
from forebay.web.replies import ClientGone


class BodyLimit(NamedTuple):
    """How long one body may be, and the setting that says so."""

    num_bytes: int
    setting: str


class BodyBudget:
    """Limits on request bodies: each for itself, and all that are in memory at once.

    A body that finds no room waits while others can finish. Where bodies that have not come whole hold so much that
    the oldest of them cannot continue, whatever else is freed, the newest of them gets a 429: else they would wait
    for each other.
    """

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, wait_s: float = 60.0) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = max_bodies_bytes
        """Of all bodies together."""
        self.free_bytes = max_bodies_bytes
        self._wait_s = wait_s
        self._limit = min(BodyLimit(max_body_bytes, "max_body_bytes"), BodyLimit(max_bodies_bytes, "max_bodies_bytes"))
        # In the order in which they came. A body that came whole at once, and found room, is never in it.
        self._growing: dict[RequestBody, None] = {}

    async def read(self, scope: Scope, receive: Receive, narrower: BodyLimit | None = None) -> "RequestBody":
        """Read a body, which pays for its bytes as they arrive, and waits where there is no room for more.

        Raises ``BodyTooLarge`` without reading the rest, ``BufferFull``, ``RequestStalled``, ``ClientGone``.
        """
        limit, setting = self._limit if narrower is None else min(self._limit, narrower)
        announced = _content_length(scope)
        if announced > limit:  # before a byte is read: the client may not have begun to send
            raise BodyTooLarge(limit, setting)
        connection = connection_of(scope)
        body = RequestBody(self)
        parts: list[bytes] = []
        size, has_more = 0, True
        try:
            while has_more:
                if connection is None:
                    message = await receive()
                else:
                    connection.is_awaited = connection.has_sent_body = True
                    message = await receive()
                    connection.is_awaited = False
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part, has_more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limit:  # also of a body whose length was announced wrongly, or not at all
                    raise BodyTooLarge(limit, setting)
                if has_more:
                    self._growing[body] = None
                    if connection is not None and connection.is_late:
                        raise RequestStalled("the body stood still for too long", "body_timeout_s")
                if not self._take(body, len(part)):
                    if connection is not None:
                        connection.pause_reading()
                    await self._wait(body, len(part))
                parts.append(part)
        except BaseException:  # whatever ended the reading, the room must come back
            body.free()
            raise
        if len(parts) > 1:
            body.finish()
        body.data = parts[0] if len(parts) == 1 else b"".join(parts)
        return body

    async def unfold(self, body: "RequestBody", num_bytes: int) -> None:
        """Let ``body`` pay for ``num_bytes`` more. Raises ``BufferFull``, ``BodyTooLarge``."""
        self._growing[body] = None
        if not self._take(body, num_bytes):
            await self._wait(body, num_bytes)

    def finish(self, body: "RequestBody") -> None:
        """The body is whole; its room is freed when it is done with."""
        if body in self._growing:
            del self._growing[body]
            self._share_out()

    def free(self, body: "RequestBody") -> None:
        """Take back what the body had; it may be called twice."""
        self.free_bytes += body.num_bytes
        body.num_bytes = 0
        self._growing.pop(body, None)
        if self._growing:
            self._share_out()

    def _take(self, body: "RequestBody", num_bytes: int) -> bool:
        """Whether there was room; then it is the body's."""
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        body.num_bytes += num_bytes
        return True

    async def _wait(self, body: "RequestBody", num_bytes: int) -> None:
        """Wait until there is room, and take it. Raises ``BufferFull``, ``BodyTooLarge``."""
        self._growing[body] = None
        body.wanted_bytes = num_bytes
        waiter = body.waiter = asyncio.get_running_loop().create_future()
        try:
            self._share_out()
            async with asyncio.timeout(self._wait_s):
                await waiter
        except TimeoutError:
            raise _full(f"request bodies have held {self.num_bytes - self.free_bytes} bytes") from None
        finally:
            body.waiter = None

    def _share_out(self) -> None:
        """Give room to those that wait, oldest first; where that lets none of them continue, refuse the newest."""
        self._grant()
        while (blocked := self._newest_of_a_deadlock()) is not None:
            assert blocked.waiter is not None
            is_alone = blocked.num_bytes + blocked.wanted_bytes > self.num_bytes
            why = "request bodies that have not come whole hold all room for them, and this one came last"
            blocked.waiter.set_exception(BodyTooLarge(self.num_bytes, "max_bodies_bytes") if is_alone else _full(why))
            self.free_bytes += blocked.num_bytes
            blocked.num_bytes = 0
            del self._growing[blocked]
            self._grant()

    def _grant(self) -> None:
        for body in self._growing:
            if not body.is_waiting:
                continue
            if not self._take(body, body.wanted_bytes):  # no body that came later goes first
                return
            assert body.waiter is not None
            body.waiter.set_result(None)

    def _newest_of_a_deadlock(self) -> "RequestBody | None":
        if not self._growing or not all(body.is_waiting for body in self._growing):
            return None
        oldest = next(iter(self._growing))
        if sum(body.num_bytes for body in self._growing) + oldest.wanted_bytes <= self.num_bytes:
            return None  # bodies that came whole make room
        return next((body for body in reversed(self._growing) if body.num_bytes), None)


class RequestBody:
    """A body and what it has of the budget; ``free`` it when it is done with."""

    __slots__ = ("_budget", "data", "num_bytes", "waiter", "wanted_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.data = b""
        self.num_bytes = 0
        self.wanted_bytes = 0
        self.waiter: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for room, and has not been given any."""
        return self.waiter is not None and not self.waiter.done()

    async def unfold(self, num_bytes: int) -> None:
        """Pay for ``num_bytes`` more that come of it. Raises ``BufferFull``, ``BodyTooLarge``."""
        await self._budget.unfold(self, num_bytes)

    def finish(self) -> None:
        """Nothing more comes of it."""
        self._budget.finish(self)

    def free(self) -> None:
        """Give the room back."""
        self._budget.free(self)


def _full(what: str) -> BufferFull:
    return BufferFull(what, hint="try again after Retry-After, send less at once, or raise max_bodies_bytes")


def _content_length(scope: Scope) -> int:
    """What the client announced; 0 where it announced nothing, or nothing that is a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


class BodyMiddleware:
    """Stands in front of a framework, whose routes may then read bodies as they like.

    A body is read when a route first asks for it, so that whoever must not call has been refused before. What the
    budget raises (``BodyTooLarge``, ``BufferFull``, ``ClientGone``) the route's own call raises, and the framework
    answers as it answers every error.
    """

    def __init__(self, app: ASGIApp, bodies: BodyBudget, limit: BodyLimit | None = None) -> None:
        self._app = app
        self._bodies = bodies
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body: RequestBody | None = None

        async def receive_whole() -> Message:
            nonlocal body
            if body is not None:  # who asks again wants to know when the client goes away
                return await receive()
            body = await self._bodies.read(scope, receive, self._limit)
            message: dict[str, Any] = {"type": "http.request", "body": body.data, "more_body": False}
            return message

        try:
            await self._app(scope, receive_whole, send)
        finally:
            if body is not None:
                body.free()
