"""Failed calls of the openai package: whether the engine is gone, what is at fault, and whether to retry."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
import openai

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.router_workers import UNAVAILABLE_STATUSES

T = TypeVar("T")

MAX_BROKEN = 3
"""Connection failures that end a call, as at the gateway."""
NEVER_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout)
PLAIN = (str, bytes, int, float, list, dict, type(None))
"""Types that the package returns for a reply that it cannot parse into a model."""


def is_unavailable(error: openai.APIError | EngineUnavailable) -> bool:
    """Whether a call failed because the engine is unreachable or returned 502 or 503."""
    if isinstance(error, EngineUnavailable):  # from before the call was sent
        return True
    if isinstance(error, openai.APIStatusError):
        return error.status_code in UNAVAILABLE_STATUSES
    if isinstance(error, openai.APITimeoutError):
        return isinstance(error.__cause__, httpx2.ConnectTimeout)
    # The package raises the same error for an unreadable reply, but with another cause.
    return isinstance(error, openai.APIConnectionError) and isinstance(error.__cause__, httpx2.TransportError | None)


class Attempts:
    """Counts broken connections of one call of a rollout function, to limit its retries."""

    def __init__(self) -> None:
        self._num_broken = 0

    def check(self, error: openai.APIError | EngineUnavailable) -> None:
        """Return if the call should be retried; otherwise raise ``error`` or a more specific ``EngineError``."""
        cause = error.__cause__
        if not is_unavailable(error):
            if isinstance(cause, EngineError):
                raise cause from None
            if type(error) is openai.APIConnectionError:
                raise EngineError(f"cannot read the engine's reply: {cause!r:.300}") from error
            raise error
        is_broken = isinstance(cause, httpx2.TransportError) and not isinstance(cause, NEVER_CONNECTED)
        self._num_broken += is_broken
        if self._num_broken >= MAX_BROKEN:
            raise EngineError(f"the connection to the engine broke {MAX_BROKEN} times: {cause!r:.300}") from error


@contextmanager
def engine_at_fault() -> Iterator[None]:
    """Wrap a call of the openai package: raises ``EngineError`` if the package cannot read the reply."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, AttributeError) as error:
        raise EngineError(f"cannot read the engine's reply: {error!r:.300}", status_code=200) from error


def checked_kind(cast_to: Any, reply: T) -> T:
    """Return ``reply``. Raises ``EngineError`` if the package returned plain data instead of a ``cast_to``."""
    if isinstance(cast_to, type) and issubclass(cast_to, openai.BaseModel) and isinstance(reply, PLAIN):
        raise EngineError(f"the engine's reply is not a {cast_to.__name__}: {reply!r:.200}", status_code=200)
    return reply
