"""The routes that carry samples, as plain ASGI: they answer before the framework is asked."""

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.buffer.buffer import Entry
from forebay.server.routes.plain_route import Find, HotRoute
from forebay.server.routes.read_batches import NativeRead, SlimeRead
from forebay.server.routes.write_samples import NativeWrite, SlimeWrite
from forebay.server.services import Services
from forebay.web.replies import ClientGone

Match = tuple[HotRoute, Find, str]
"""A route, how it finds its run, and by what."""


class HotPaths:
    """Which path leads to which route (``openapi.HOT_PATHS`` lists them)."""

    def __init__(self) -> None:
        slime_read, slime_write, native_write = SlimeRead(), SlimeWrite(), NativeWrite()
        self._named: dict[str, tuple[HotRoute, Find]] = {
            "buffer/write": (slime_write, Services.writable),
            "get_rollout_data": (slime_read, Services.named),
            "buffer/read": (slime_read, Services.named),
        }
        self._by_kind: dict[str, dict[str, tuple[HotRoute, Find]]] = {
            "s": self._named,
            "w": {"buffer/write": (slime_write, _by_key), "samples": (native_write, _by_key)},
            "v1/runs": {"samples": (native_write, _by_id), "batches": (NativeRead(), _by_id)},
        }

    def match(self, path: str) -> Match | None:
        """The route of a POST to ``path``, and how it finds its run; None if it is no hot path."""
        found = self._named.get(path[1:])
        if found is not None:
            return (*found, "")
        kind, _, rest = path[1:].partition("/")
        if kind == "v1":
            resource, _, rest = rest.partition("/")
            kind = f"v1/{resource}"
        name, _, action = rest.partition("/")
        found = self._by_kind.get(kind, {}).get(action)
        return None if found is None else (*found, name)


class HotRoutes:
    """Takes the hot paths, passes everything else on to ``app``."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services
        self._paths = HotPaths()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._paths.match(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        route, find, name = found
        try:  # noqa: SIM105 - a context manager costs a microsecond on each write
            await route(self._services, find, name, scope, receive, send)
        except ClientGone:
            pass


def _by_key(services: Services, run_key: str) -> Entry:
    return services.buffer.by_key(run_key)


def _by_id(services: Services, run_id: str) -> Entry:
    return services.buffer.get(run_id)
