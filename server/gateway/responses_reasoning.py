"""Reasoning in ``encrypted_content``, for clients that keep no state here. It is packed, not secret."""

import base64
import zlib

PREFIX = "forebay-reasoning-v1."
MAX_BYTES = 16 * 1024 * 1024
"""The most that a blob opens to."""


def packed(text: str) -> str:
    """The blob for a text."""
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def opened(blob: str | None) -> str:
    """The text of a blob; empty for one that was not packed here."""
    if not blob or not blob.startswith(PREFIX):
        return ""
    try:
        return zlib.decompressobj().decompress(base64.urlsafe_b64decode(blob.removeprefix(PREFIX)), MAX_BYTES).decode()
    except (ValueError, zlib.error):
        return ""
