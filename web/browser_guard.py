"""Protects a server without a token from web pages in a user's browser. Other programs are not affected.

A page can reach what the browser's machine reaches. A page may point its own host name at this server once it is loaded
("DNS rebinding") and then read replies: such requests have that name as ``Host``. To the server's real address a page
can only send, which is enough to start code. Browsers name the page's site in ``Origin`` or ``Sec-Fetch-Site``.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.core.addresses import own_names
from forebay.core.errors import ForebayError, ForeignOrigin, HostNotAllowed
from forebay.web.replies import encode, envelope, send_json

HOST, ORIGIN, SITE = b"host", b"origin", b"sec-fetch-site"
_WATCHED = frozenset({HOST, ORIGIN, SITE})
_OWN_SITES = frozenset({b"same-origin", b"none"})
"""``Sec-Fetch-Site`` of the page's own requests, and of addresses that the user typed."""
_ASKING = frozenset({"GET", "HEAD"})
"""Links and images of other sites send these methods; those sites cannot read the replies."""
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]*)?")
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#@]+)")
_KNOWN_HOSTS = 256


class BrowserGuard:
    """Refuses what browsers send for pages of other sites: unknown names with 421, foreign origins with 403.

    ``names`` are allowed in addition to this machine's own; one that begins with a dot is a suffix. IP addresses are
    always allowed, and so is every name with ``is_insecure``. A request without these headers passes.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Iterable[str] = (),
        *,
        is_insecure: bool = False,
        error_body: Callable[[ForebayError], dict[str, Any]] = envelope,
    ) -> None:
        known = own_names() | {name.lower() for name in names if name}
        self._app = app
        self._error_body = error_body
        self._is_insecure = is_insecure
        self._names = frozenset(name for name in known if not name.startswith("."))
        self._suffixes = (".localhost", *(name for name in known if name.startswith(".")))
        # Nearly every request has one of a few hosts.
        self._is_own = lru_cache(_KNOWN_HOSTS)(self._look_at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await send_json(send, error.status, encode(self._error_body(error)))

    def _refusal(self, scope: Scope) -> ForebayError | None:
        host: bytes | None = None
        # Requests of programs are recognised in a microsecond: a write takes only a few dozen.
        for name, value in scope["headers"]:
            if name in _WATCHED:
                if name != HOST or host is not None:
                    return self._look_closely(scope)
                host = value
        return None if self._is_own(host) else self._look_closely(scope)

    def _look_closely(self, scope: Scope) -> ForebayError | None:
        # Every value of a repeated header must pass: implementations differ in which one counts.
        kinds = HOST, ORIGIN, SITE
        hosts, origins, sites = ({value for name, value in scope["headers"] if name == kind} for kind in kinds)
        for host in hosts:
            if not self._is_own(host):
                return _not_ours(_shown(host))
        for origin in origins:
            if not all(_is_same(origin, host) for host in hosts or {b""}):
                return _foreign("Origin", _shown(origin))
        for site in sites - _OWN_SITES if scope["method"] not in _ASKING else ():
            return _foreign("Sec-Fetch-Site", _shown(site))
        return None

    def _look_at(self, host: bytes | None) -> bool:
        """Whether the name is this server's own, so that no one else can point it here. Browsers always send it."""
        if self._is_insecure or host is None:
            return True
        parts = _AUTHORITY.fullmatch(_shown(host).lower())
        if parts is None:
            return False
        name = (parts["name"] or "").removesuffix(".")
        return _is_ip_address(parts["ipv6"] or name) or name in self._names or name.endswith(self._suffixes)


def _is_same(origin: bytes, host: bytes) -> bool:
    """Whether ``host`` served a page of this origin. Behind a proxy, its scheme may differ from ours."""
    parts = _ORIGIN.fullmatch(_shown(origin).lower())
    if parts is None:  # `null`, or a page of an extension's
        return False
    authority, port = parts["authority"], _DEFAULT_PORTS[parts["scheme"]]
    return authority.removesuffix(port) == _shown(host).lower().removesuffix(port)


def _is_ip_address(text: str) -> bool:
    kind = IPv6Address if ":" in text else IPv4Address
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _not_ours(host: str) -> HostNotAllowed:
    return HostNotAllowed(
        f"the host {host[:100]!r} is not a name of this server",
        hint="call by IP address, or add the name to allowed_hosts; on a network that you trust, --insecure allows "
        "every name",
    )


def _foreign(header: str, value: str) -> ForeignOrigin:
    return ForeignOrigin(
        f"a page of another site sent this request from a browser ({header}: {value[:100]})",
        hint="call from a program, or from a page of this same address; a server with FOREBAY_TOKEN set asks for the "
        "token instead",
    )


def _shown(value: bytes) -> str:
    return value.decode("latin-1").strip()
