"""HTTP addresses: what is one, which are this machine's own, how one is shown, and which engines a start names."""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``, a name or an address."""
    return host in _LOOPBACK_HOSTS or host.startswith("127.")


def is_local_url(url: str) -> bool:
    """Whether ``url`` is this machine's own, for which no proxy is asked."""
    return is_loopback(urlsplit(url).hostname or "")


def without_login(url: str) -> str:
    """An HTTP address as it may be shown: without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_http_url(url: str) -> bool:
    """Whether ``url`` is http(s) with a host, and a port that can be connected to if it names one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is none
        return False


def engine_urls(payload: dict[str, Any]) -> list[str]:
    """The engines that a payload names: one URL, several with commas between, or a list."""
    given = payload.get("remote_engine_url") or []
    urls = given.split(",") if isinstance(given, str) else given
    return [str(url).strip() for url in urls if str(url).strip()] if isinstance(urls, list) else []
