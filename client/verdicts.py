"""What the buffer says of each sample of a write."""

import msgspec

from forebay.client.errors import told_error
from forebay.core.errors import ForebayError

REPEATABLE_CODES = frozenset({"buffer_full", "storage_failed"})
"""Codes of errors that say: the same sample is right a little later."""


def read_verdicts(body: bytes, count: int) -> list[ForebayError | None] | None:
    """What is wrong with each of ``count`` samples, None for one that is stored; None if the reply has no verdicts."""
    try:
        results = msgspec.json.decode(body).get("results")
    except (msgspec.DecodeError, AttributeError):
        return None
    if not isinstance(results, list) or len(results) != count:
        return None
    return [told_error(result.get("error"), result.get("status")) for result in results]
