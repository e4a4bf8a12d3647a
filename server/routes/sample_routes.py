"""The routes that carry samples, as plain ASGI; they answer before the framework is asked."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.core.errors import ForebayError, NoRun, RunNotFound
from forebay.server.services import Services
from forebay.web.bodies import RequestBody
from forebay.web.replies import ClientGone, encode, envelope, error_body, error_headers, send_json

FindRun = Callable[[Buffer, str], LiveRun]
"""How a route finds its run: by name, by key or by id."""


class SampleCall(NamedTuple):
    """One request: its run, its body, and its connection."""

    services: Services
    entry: LiveRun
    body: RequestBody
    scope: Scope
    receive: Receive
    send: Send

    def header(self, name: bytes) -> bytes:
        """The value of a header (name in lower case); repeated headers are joined with commas."""
        return b",".join(value for key, value in self.scope["headers"] if key == name)


class SampleRoute(ABC):
    """Answers one kind of request and formats its errors. Keeps no state of a request."""

    @abstractmethod
    async def answer(self, call: SampleCall) -> None:
        """Handle the request."""

    def error_reply(self, error: ForebayError) -> dict[str, object]:
        """The body of an error reply."""
        return error_body(error)


class SlimeRoute(SampleRoute):
    """Wraps errors in slime's envelope."""

    def error_reply(self, error: ForebayError) -> dict[str, object]:
        return envelope(error)


SamplePaths = dict[tuple[str, str], tuple[SampleRoute, FindRun]]
"""Routes by the start and the end of a path, with how each finds its run from the text between them.

``openapi.SAMPLE_PATHS`` lists them in full.
"""


def by_name(buffer: Buffer, name: str) -> LiveRun:
    """The run last started through a slime route under ``name``. Raises ``NoRun``."""
    entry = buffer.newest(name)
    if entry is None:
        raise NoRun(name)
    return entry


def by_name_to_write(buffer: Buffer, name: str) -> LiveRun:
    """The run of ``name`` for a writer, whose error is a 404. Raises ``RunNotFound``."""
    try:
        return by_name(buffer, name)
    except NoRun as error:
        raise RunNotFound(name, message=error.message, hint=error.hint) from None


class SampleRouter:
    """Serves the paths of sample routes and passes all others on to ``app``."""

    def __init__(self, app: ASGIApp, services: Services, paths: SamplePaths) -> None:
        self._app = app
        self._services = services
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._match(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        (route, find), name = found
        services, body = self._services, None
        # No further layers: a write has a budget of a few dozen microseconds.
        try:
            find(services.buffer, name)  # before the body: an unknown run reserves no room for it
            body = await services.bodies.read(scope, receive)
            await route.answer(SampleCall(services, find(services.buffer, name), body, scope, receive, send))
        except ForebayError as error:
            await send_json(send, error.status, encode(route.error_reply(error)), error_headers(error))
        except ClientGone:  # no client is left to answer
            pass
        finally:
            if body is not None:
                body.free()

    def _match(self, path: str) -> tuple[tuple[SampleRoute, FindRun], str] | None:
        """The route for a POST to ``path`` and the text that names its run; None if ``path`` carries no samples."""
        found = self._paths.get(("", path[1:]))
        if found is not None:
            return found, ""
        kind, _, rest = path[1:].partition("/")
        if kind == "v1":
            resource, _, rest = rest.partition("/")
            kind = f"v1/{resource}"
        name, _, action = rest.partition("/")
        if action.startswith("batches/"):  # then follows an id, which the route reads itself
            action = f"batches/*/{action.rpartition('/')[2]}"
        found = self._paths.get((kind, action))
        return None if found is None else (found, name)
