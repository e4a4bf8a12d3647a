"""Calls of the openai package that fail: whether the engine is gone, whose fault it is, and whether to call again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
import openai

from forebay.core.errors import EngineError
from forebay.engines.router_workers import UNAVAILABLE_STATUSES

T = TypeVar("T")

MAX_BROKEN = 3
"""So often may a connection break under a call, as at the gateway."""
NEVER_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout)
PLAIN = (str, bytes, int, float, list, dict, type(None))
"""What the package hands on of a reply that is none of its models."""


def is_unavailable(error: openai.APIError) -> bool:
    """Whether a call failed because nobody answers at the engine's address, or it says 502 or 503."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in UNAVAILABLE_STATUSES
    if isinstance(error, openai.APITimeoutError):
        return isinstance(error.__cause__, httpx2.ConnectTimeout)
    # Of an engine that is there, and answers what nobody can read, the package says the same.
    return isinstance(error, openai.APIConnectionError) and isinstance(error.__cause__, httpx2.TransportError | None)


class Attempts:
    """Those of one call of a rollout function, which an engine that breaks under it must not have without end."""

    def __init__(self) -> None:
        self._num_broken = 0

    def check(self, error: openai.APIError) -> None:
        """Return if the call is to be made again. Raises ``error``, or an ``EngineError`` that says more."""
        cause = error.__cause__
        if not is_unavailable(error):
            if isinstance(cause, EngineError):
                raise cause from None
            if type(error) is openai.APIConnectionError:
                raise EngineError(f"the engine answers what cannot be read: {cause!r:.300}") from error
            raise error
        is_broken = isinstance(cause, httpx2.TransportError) and not isinstance(cause, NEVER_CONNECTED)
        self._num_broken += is_broken
        if self._num_broken >= MAX_BROKEN:
            raise EngineError(f"the connection to the engine broke again and again: {cause!r:.300}") from error


@contextmanager
def engine_at_fault() -> Iterator[None]:
    """Around a call of the openai package: what it cannot read of a reply is an ``EngineError``."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, AttributeError) as error:
        raise EngineError(f"the engine answers what cannot be read: {error!r:.300}", status_code=200) from error


def checked_kind(cast_to: Any, reply: T) -> T:
    """``reply``, which the package was to make a ``cast_to`` of. Raises ``EngineError`` if it is a text, or nothing."""
    if isinstance(cast_to, type) and issubclass(cast_to, openai.BaseModel) and isinstance(reply, PLAIN):
        raise EngineError(f"the engine answered no {cast_to.__name__}: {reply!r:.200}", status_code=200)
    return reply
