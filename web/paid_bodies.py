"""Bodies that a framework reads: whole, within a limit, and paid for until their request is answered."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.web.bodies import BodyBudget, BodyLimit, RequestBody


class PaidBodies:
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
