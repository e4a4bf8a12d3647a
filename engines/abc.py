"""The interface of every engine client, and the values it takes and returns."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineUnavailable

ABORT_TIMEOUT_S = 3.0
"""How long an abort is repeated by default."""
MARK = {"input_ids": [0], "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}}
"""Request body that ``aborts.py`` sends under a ``rid`` prefix so that the server finds the prefix."""

PROBE_FIRST_S = 0.1
PROBE_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Number of requests an engine is generating for, and number waiting in its queue."""

    running: int = 0
    waiting: int = 0

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return self.running == 0 and self.waiting == 0

    def __add__(self, other: "EngineLoad") -> "EngineLoad":
        return EngineLoad(self.running + other.running, self.waiting + other.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model an engine serves. ``None`` for fields the engine does not report."""

    model: str
    model_path: str | None = None
    weight_version: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """Client of an inference server. Enter it with ``async with`` before the first call; entering opens connections."""

    url: str
    """The server's address, without a trailing ``/v1``."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Return the served model.

        Raises ``EngineUnavailable`` (unreachable, 502, 503), ``EngineError`` (any other error status) and
        ``TimeoutError``.
        """

    @abstractmethod
    async def is_available(self) -> bool:
        """Ask the server whether it accepts requests. Returns ``False`` if the server does not answer."""

    async def load(self) -> EngineLoad | None:
        """Return the server's running and waiting requests, or ``None`` if it does not report them."""
        return None

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:  # noqa: ARG002 - the default cannot abort
        """Stop every call whose ``rid`` begins with ``rid_prefix``, for up to ``timeout_s`` seconds.

        Returns the number of servers that accepted the abort, or ``None`` if no server supports aborts. A stopped call
        returns with ``finish_reason`` ``abort``.
        """
        return None

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:  # noqa: ARG002 - the default cannot abort
        """Stop every call of the server, including other clients' calls. Returns the same value as ``abort``."""
        return None

    async def wait_available(self, timeout_s: float | None = None) -> None:
        """Return as soon as the server accepts requests; ``None`` waits forever.

        Polls with back-off, up to 5 s apart. Raises ``EngineUnavailable`` after ``timeout_s`` seconds.
        """
        pauses = Backoff(PROBE_FIRST_S, PROBE_MAX_S, is_exact=True)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.is_available():
                    await pauses.wait()
        except TimeoutError:
            raise EngineUnavailable(
                f"no engine at {self.url} accepted requests within {timeout_s:g} s", hint="start it or check its URL"
            ) from None
