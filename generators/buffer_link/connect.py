"""From a ``remote_buffer_url`` to the link that speaks with what answers there."""

import re

from forebay.core.addresses import is_http_url
from forebay.core.errors import InvalidInput
from forebay.generators.buffer_link.abc import Link
from forebay.generators.buffer_link.forebay import ServerLink
from forebay.generators.buffer_link.slime import SlimeLink


def connect_link(url: str) -> Link:
    """A ``ServerLink`` for an address that ends in ``/w/{run_key}``, else a ``SlimeLink``. Raises ``InvalidInput``."""
    if not is_http_url(url):
        raise InvalidInput(f"remote_buffer_url must be an http address, got {url!r:.200}", field="remote_buffer_url")
    return ServerLink(url) if re.search(r"/w/[^/]+/?$", url) else SlimeLink(url)
