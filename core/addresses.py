"""Which addresses are this machine's own."""

_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``, a name or an address."""
    return host in _HOSTS or host.startswith("127.")
