"""Sockets that are bound before anything is served on them, so that their addresses are known first."""

import socket

from forebay.core.errors import InvalidInput


def bind(host: str, port: int, *, setting: str = "port") -> socket.socket:
    """A socket bound to ``host`` and ``port``. Raises ``InvalidInput`` that names ``setting`` if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InvalidInput(
            f"port {port} of {host} cannot be used: {error.strerror}",
            hint=f"another server may be running; choose another {setting}, or 0 for a free one",
            field=setting,
        ) from None
    bound.set_inheritable(False)
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket, as processes of this machine reach it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised here, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
