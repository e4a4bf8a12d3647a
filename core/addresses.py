"""HTTP addresses: parsing, recognising this machine's own, displaying them, and the engines named in a start."""

import re
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from forebay.core.errors import InvalidInput

if TYPE_CHECKING:
    import ssl

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to ``host``, a name or an address."""
    return host in _LOOPBACK_HOSTS or host.startswith("127.")


def is_local_url(url: str) -> bool:
    """Return whether ``url`` points to this machine, so that no proxy is used."""
    return is_loopback(urlsplit(url).hostname or "")


def is_own_host(host: str) -> bool:
    """Return whether ``host`` is a name of this machine or an address of one of its interfaces."""
    if is_loopback(host) or host.lower() in own_names():
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)  # accepts addresses only, so no DNS lookup happens
        with socket.socket(family) as bound:
            bound.bind((host, 0))
    except OSError:
        return False
    return True


@cache
def trusts_nobody() -> "ssl.SSLContext":
    """TLS context for plain-HTTP clients. It trusts no certificate: loading certificates would dominate start-up."""
    import ssl  # most users of this module connect to nothing

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


_HOSTS_FILE = Path("/etc/hosts")


def own_names() -> frozenset[str]:
    """The names of this machine, in lower case. Makes no DNS lookup, which could block the caller."""
    full = socket.gethostname().lower()
    own = {"localhost", full, full.partition(".")[0]} - {""}
    try:
        lines = _HOSTS_FILE.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    except OSError:
        return frozenset(own)
    named = [set(line.partition("#")[0].split()[1:]) for line in lines]
    return frozenset(own.union(*(names for names in named if names & own)))


_HOST_PATTERN = re.compile(r"(\*?\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def host_patterns(given: str | Sequence[str]) -> list[str]:
    """Parse host names from a list or a comma-separated text, in lower case. ``.name`` matches every name ending so.

    Raises ``InvalidInput`` for an invalid host name.
    """
    parts = given.split(",") if isinstance(given, str) else given
    return [_host_pattern(part) for part in parts if part.strip()]


def _host_pattern(text: str) -> str:
    pattern = text.strip().lower().rstrip(".")
    if not _HOST_PATTERN.fullmatch(pattern):
        raise InvalidInput(
            f"{text!r} is not a host name; write name.example without scheme and port, or .example for its subdomains",
            field="allowed_hosts",
        )
    return pattern.removeprefix("*")  # another way to write a suffix


def without_login(url: str) -> str:
    """Remove the user name and password from an HTTP address, so that it can be displayed."""
    if "@" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def engine_root(url: str) -> str:
    """Normalise an engine's address: without trailing slashes and without ``/v1``."""
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def is_http_url(url: str) -> bool:
    """Return whether ``url`` is http(s) and has a host; a port, if given, must be valid and not 0."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets or an invalid port
        return False


def engine_urls(payload: dict[str, Any]) -> list[str]:
    """List the engines that a payload names: one URL, several separated by commas, or a list."""
    given = payload.get("remote_engine_url") or []
    urls = given.split(",") if isinstance(given, str) else given
    return [str(url).strip() for url in urls if str(url).strip()] if isinstance(urls, list) else []
