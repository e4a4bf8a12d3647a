"""Request bodies: read within limits on each body and on all bodies in memory."""

import asyncio
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.core.errors import BodyTooLarge, BufferFull
from forebay.web.connection_limits import RequestStalled
from forebay.web.http_protocol import connection_of
from forebay.web.replies import ClientGone


class BodyLimit(NamedTuple):
    """Maximum length of one body, and the setting that defines it."""

    num_bytes: int
    setting: str


class BodyBudget:
    """Limits on request bodies: on each one, and on all that are in memory at once.

    A body that finds no room waits while others can finish. Incomplete bodies may hold so much that the oldest of them
    cannot continue, even if all others finish. Then the newest incomplete body gets a 429, which prevents a deadlock.
    """

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, wait_s: float = 60.0) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = max_bodies_bytes
        """Limit on all bodies together."""
        self.free_bytes = max_bodies_bytes
        self._wait_s = wait_s
        self._limit = min(BodyLimit(max_body_bytes, "max_body_bytes"), BodyLimit(max_bodies_bytes, "max_bodies_bytes"))
        # In order of arrival. A body that arrived whole at once, and found room, is never in it.
        self._growing: dict[RequestBody, None] = {}

    async def read(self, scope: Scope, receive: Receive, narrower: BodyLimit | None = None) -> "RequestBody":
        """Read a body. It takes room for its bytes as they arrive, and waits if there is none.

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
                if size > limit:  # the announced length may be wrong or missing
                    raise BodyTooLarge(limit, setting)
                if has_more:
                    self._growing[body] = None
                    if connection is not None and connection.is_late:
                        raise RequestStalled("the body was stalled for too long", "body_timeout_s")
                if not self._take(body, len(part)):
                    if connection is not None:
                        connection.pause_reading()
                    await self._wait(body, len(part))
                parts.append(part)
        except BaseException:  # whatever ended the reading, its room must be freed
            body.free()
            raise
        if len(parts) > 1:
            body.finish()
        body.data = parts[0] if len(parts) == 1 else b"".join(parts)
        return body

    async def unfold(self, body: "RequestBody", num_bytes: int) -> None:
        """Take ``num_bytes`` more room for ``body``. Raises ``BufferFull``, ``BodyTooLarge``."""
        self._growing[body] = None
        if not self._take(body, num_bytes):
            await self._wait(body, num_bytes)

    def finish(self, body: "RequestBody") -> None:
        """Mark the body as complete; its room is freed after use."""
        if body in self._growing:
            del self._growing[body]
            self._share_out()

    def free(self, body: "RequestBody") -> None:
        """Free the body's room. It may be called twice."""
        self.free_bytes += body.num_bytes
        body.num_bytes = 0
        self._growing.pop(body, None)
        if self._growing:
            self._share_out()

    def _take(self, body: "RequestBody", num_bytes: int) -> bool:
        """Take room for the body if there is enough; return whether there was."""
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
            raise _full(f"request bodies fill {self.num_bytes - self.free_bytes} bytes") from None
        finally:
            body.waiter = None

    def _share_out(self) -> None:
        """Give room to waiting bodies, oldest first; if none of them can continue, refuse the newest."""
        self._grant()
        while (blocked := self._newest_of_a_deadlock()) is not None:
            assert blocked.waiter is not None
            is_alone = blocked.num_bytes + blocked.wanted_bytes > self.num_bytes
            why = "incomplete request bodies fill all room for bodies, and this one arrived last"
            blocked.waiter.set_exception(BodyTooLarge(self.num_bytes, "max_bodies_bytes") if is_alone else _full(why))
            self.free_bytes += blocked.num_bytes
            blocked.num_bytes = 0
            del self._growing[blocked]
            self._grant()

    def _grant(self) -> None:
        for body in self._growing:
            if not body.is_waiting:
                continue
            if not self._take(body, body.wanted_bytes):  # no later body goes first
                return
            assert body.waiter is not None
            body.waiter.set_result(None)

    def _newest_of_a_deadlock(self) -> "RequestBody | None":
        if not self._growing or not all(body.is_waiting for body in self._growing):
            return None
        oldest = next(iter(self._growing))
        if sum(body.num_bytes for body in self._growing) + oldest.wanted_bytes <= self.num_bytes:
            return None  # complete bodies will make room
        return next((body for body in reversed(self._growing) if body.num_bytes), None)


class RequestBody:
    """A body and its share of the budget; ``free`` it after use."""

    __slots__ = ("_budget", "data", "num_bytes", "waiter", "wanted_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.data = b""
        self.num_bytes = 0
        self.wanted_bytes = 0
        self.waiter: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the body is waiting for room."""
        return self.waiter is not None and not self.waiter.done()

    async def unfold(self, num_bytes: int) -> None:
        """Take room for ``num_bytes`` more bytes made from it. Raises ``BufferFull``, ``BodyTooLarge``."""
        await self._budget.unfold(self, num_bytes)

    def finish(self) -> None:
        """Mark the body as complete."""
        self._budget.finish(self)

    def free(self) -> None:
        """Free the room."""
        self._budget.free(self)


def _full(what: str) -> BufferFull:
    return BufferFull(what, hint="retry after Retry-After, send less at once, or raise max_bodies_bytes")


def _content_length(scope: Scope) -> int:
    """The announced length; 0 if the client announced none or an invalid one."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


class BodyMiddleware:
    """Wraps a framework app, whose routes then read bodies as usual.

    A body is read when a route first asks for it, so that unauthorized callers are refused before. Errors of the budget
    (``BodyTooLarge``, ``BufferFull``, ``ClientGone``) are raised from the route's own call, and answered like any other
    error.
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
            if body is not None:  # a second call waits for the client to disconnect
                return await receive()
            body = await self._bodies.read(scope, receive, self._limit)
            message: dict[str, Any] = {"type": "http.request", "body": body.data, "more_body": False}
            return message

        try:
            await self._app(scope, receive_whole, send)
        finally:
            if body is not None:
                body.free()
