"""Who may call: a bearer token for everything but health checks, a run's own key for its writes."""

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.core.errors import Unauthorized
from forebay.web.replies import encode, error_body, send_json

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})


class Guard:
    """Asks for the token. Paths under ``/w/`` carry a run's key instead, which their route checks."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            error = Unauthorized(
                "the bearer token is missing or wrong", hint="send the header Authorization: Bearer <FOREBAY_TOKEN>"
            )
            body = {"success": False, "message": error.message, **error_body(error)}
            await send_json(send, error.status, encode(body), [(b"www-authenticate", b"Bearer")])
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith("/w/"):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        # In the same time whatever was given: how long a comparison takes would tell how much of it is right.
        return secrets.compare_digest(given, self._expected)
