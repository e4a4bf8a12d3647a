"""Whether workers on other machines reach what they have to: the server, the gateway of agents, the engines."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from forebay.core.addresses import engine_urls, is_local_url, without_login
from forebay.core.errors import InvalidInput

Address = tuple[str, str]
"""A URL, after the field or setting that says it."""
CONNECT_S = 5.0
_WHAT = {
    "public_url": ("this server", "the server's setting public_url is the address by which they can"),
    "gateway_url": ("the gateway", "the server's setting gateway_url is the address by which they can"),
    "remote_engine_url": ("the engine", "name it by an address that they can reach"),
}


class NeededAddresses:
    """What the workers of a run on a cluster need; ``has_others``: some of its nodes are other machines."""

    def __init__(self, payload: dict[str, Any], *, has_others: bool) -> None:
        self._has_others = has_others
        self.addresses: list[Address] = []
        self.need("public_url", str(payload["remote_buffer_url"]).partition("/w/")[0])
        for url in engine_urls(payload):
            self.need("remote_engine_url", url)

    def need(self, field: str, url: str) -> None:
        """One more. Raises ``InvalidInput`` if it is this machine's alone, and there are others."""
        if self._has_others:
            check_address_of(field, url)
        self.addresses.append((field, url))


def check_address_of(field: str, url: str) -> None:
    """Raises ``InvalidInput`` if other machines cannot reach it."""
    if is_local_url(url):
        raise refusal((field, url), "workers on other machines")


def refusal(address: Address, who: str) -> InvalidInput:
    """``who`` cannot reach it."""
    field, url = address
    what, hint = _WHAT[field]
    return InvalidInput(f"{who} cannot reach {what} at {without_login(url)}", hint=hint, field=field)


async def out_of_reach(addresses: Sequence[Address]) -> list[Address]:
    """Those at which nobody takes a connection from here."""
    answers = await asyncio.gather(*(_takes_connection(url) for _, url in addresses))
    return [address for address, answers_us in zip(addresses, answers, strict=True) if not answers_us]


async def _takes_connection(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError:  # a time-out is one, too
        return False
    writer.close()
    return True
