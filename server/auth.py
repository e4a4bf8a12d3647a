"""Authentication: a bearer token for everything except health checks, a run's own key for its processes.

Both are checked before the first byte of a body is read. If the application reads nothing, uvicorn accepts no more
than its buffer holds, and sends no ``100 Continue``.
"""

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.buffer.buffer import Buffer
from forebay.core.errors import RunNotFound, Unauthorized
from forebay.web.replies import encode, envelope, send_json

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/ui"})
UI_PATHS = "/ui/"
"""The files of the page, which hold nothing secret: the page asks for the token."""
RUN_PATHS = "/w/"
READING = frozenset({"GET", "HEAD"})


class Guard:
    """Checks the bearer token, or for reading the viewer's; "" as ``viewer_token`` is none.

    Paths under ``/w/`` carry a run's key instead, which ``RunKeys`` checks.
    """

    def __init__(self, app: ASGIApp, token: str, viewer_token: str = "") -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._expected_to_read = f"Bearer {viewer_token}".encode() if viewer_token else self._expected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            error = Unauthorized(
                "the bearer token is missing or wrong", hint="send the header Authorization: Bearer <FOREBAY_TOKEN>"
            )
            await send_json(send, error.status, encode(envelope(error)), [(b"www-authenticate", b"Bearer")])
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith((RUN_PATHS, UI_PATHS)):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        # Constant time: the duration of a comparison would reveal how much of the token is right.
        if secrets.compare_digest(given, self._expected):
            return True
        return scope["method"] in READING and secrets.compare_digest(given, self._expected_to_read)


class RunKeys:
    """Checks the run's key under ``/w/``, also on paths that no route has; 404 for an unknown key.

    A dictionary finds the key by a hash seeded per process, and compares it only to a key with the same hash. The time
    this takes does not reveal how much of a key is right.
    """

    def __init__(self, app: ASGIApp, buffer: Buffer) -> None:
        self._app = app
        self._buffer = buffer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(RUN_PATHS):
            try:
                self._buffer.by_key(scope["path"].removeprefix(RUN_PATHS).partition("/")[0])
            except RunNotFound as error:
                await send_json(send, error.status, encode(envelope(error)))
                return
        await self._app(scope, receive, send)
