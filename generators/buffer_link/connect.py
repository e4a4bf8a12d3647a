"""From a ``remote_buffer_url`` to the link that speaks with what answers there."""

import re

from forebay.core.errors import InvalidInput
from forebay.generators.buffer_link.abc import Link
from forebay.generators.buffer_link.forebay import ServerLink
from forebay.generators.buffer_link.slime import SlimeLink


def connect_link(url: str) -> Link:
    """A ``ServerLink`` for an address that ends in ``/w/{run_key}``, else a ``SlimeLink``. Raises ``InvalidInput``."""
    if not re.match(r"https?://[^/]", url):
        raise InvalidInput(f"remote_buffer_url must be an http address, got {url!r:.200}", field="remote_buffer_url")
    if re.search(r"/w/[^/]+/?$", url):
        return ServerLink(url)
    return SlimeLink(url)
