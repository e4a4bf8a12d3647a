"""HTTP addresses: what is one, and which are this machine's own."""

from urllib.parse import urlsplit

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``, a name or an address."""
    return host in _LOOPBACK_HOSTS or host.startswith("127.")


def is_local_url(url: str) -> bool:
    """Whether ``url`` is this machine's own, for which no proxy is asked."""
    return is_loopback(urlsplit(url).hostname or "")


def is_http_url(url: str) -> bool:
    """Whether ``url`` is http(s) with a host, and a port that can be connected to if it names one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is none
        return False
