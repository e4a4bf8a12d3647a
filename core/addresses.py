"""HTTP addresses: what is one, which are this machine's own, how one is shown, and which engines a start names."""

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
    """Whether only this machine can connect to ``host``, a name or an address."""
    return host in _LOOPBACK_HOSTS or host.startswith("127.")


def is_local_url(url: str) -> bool:
    """Whether ``url`` is this machine's own, for which no proxy is asked."""
    return is_loopback(urlsplit(url).hostname or "")


def is_own_host(host: str) -> bool:
    """Whether ``host`` is this machine: a name of it, or an address of one of its interfaces."""
    if is_loopback(host) or host.lower() in own_names():
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)  # a name server is not asked
        with socket.socket(family) as bound:
            bound.bind((host, 0))
    except OSError:
        return False
    return True


@cache
def trusts_nobody() -> "ssl.SSLContext":
    """For clients that ask over plain HTTP alone: reading certificates takes longer than all that most of them ask."""
    import ssl  # few of those who need addresses ask anybody

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


_HOSTS_FILE = Path("/etc/hosts")


def own_names() -> frozenset[str]:
    """The names of this machine, in lower case. No name server is asked: it may keep the caller waiting."""
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
    """Host names in lower case, out of a list or a text with commas between. ``.name`` stands for all that end so.

    Raises ``InvalidInput`` for what is no name.
    """
    parts = given.split(",") if isinstance(given, str) else given
    return [_host_pattern(part) for part in parts if part.strip()]


def _host_pattern(text: str) -> str:
    pattern = text.strip().lower().rstrip(".")
    if not _HOST_PATTERN.fullmatch(pattern):
        raise InvalidInput(
            f"{text!r} is no host name; write name.example, without scheme and port, or .example for all that end so",
            field="allowed_hosts",
        )
    return pattern.removeprefix("*")  # another way to write a suffix


def without_login(url: str) -> str:
    """An HTTP address as it may be shown: without user name and password."""
    if "@" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def engine_root(url: str) -> str:
    """The address of an engine without trailing slashes and without ``/v1``."""
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


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
