"""What every engine client can do, and the values that go in and come out."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from forebay.core.errors import EngineUnavailable

ABORT_TIMEOUT_S = 3.0
"""How long an abort is repeated at most when the caller does not say."""

PROBE_FIRST_S = 0.1
PROBE_MAX_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One chat completion to ask for.

    ``messages`` are OpenAI chat messages, ``sampling_params`` OpenAI sampling fields (``max_tokens``, ``temperature``,
    …) and ``extra`` any further field of the body. ``rid`` is the id by which an SGLang engine is told to stop. After
    ``timeout_s`` seconds the call is given up. ``continue_final_message`` goes on from the text of the last
    (assistant) message.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    rid: str | None = None
    timeout_s: float | None = None
    continue_final_message: bool = False
    n: int = 1
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What came back: the first choice, the token counts of the whole reply, and ``raw``, the decoded body."""

    message: dict[str, Any]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    rid: str | None
    raw: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        """The text of every choice, ``n`` of them."""
        return [choice["message"].get("content") or "" for choice in self.raw["choices"]]

    @property
    def aborted(self) -> bool:
        """The engine stopped the call before it was finished; ``text`` is what it had by then."""
        return self.finish_reason == "abort"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests that an engine is generating for, and requests waiting in its queue."""

    running: int = 0
    waiting: int = 0

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.running == 0 and self.waiting == 0

    def __add__(self, other: "EngineLoad") -> "EngineLoad":
        return EngineLoad(self.running + other.running, self.waiting + other.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Which model an engine serves. What an engine does not tell is ``None``."""

    model: str
    model_path: str | None = None
    weight_version: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """A client of an inference server. Enter it with ``async with`` before the first call; it opens connections."""

    url: str
    """The server's address, without a trailing ``/v1``."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def chat(self, request: ChatRequest) -> ChatReply:
        """Ask for one completion. Never retried here.

        Raises ``EngineUnavailable`` (nobody answers, 502, 503), ``EngineError`` (any other error status) and
        ``TimeoutError``.
        """

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """The model that is served. Raises as ``chat`` does."""

    @abstractmethod
    async def is_available(self) -> bool:
        """Ask the server now whether it takes requests. Never raises for a server that does not answer."""

    async def load(self) -> EngineLoad | None:
        """What the server is busy with, or ``None`` where it does not tell."""
        return None

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:  # noqa: ARG002 - the default cannot abort
        """Stop every call whose ``rid`` begins with ``rid_prefix``, for up to ``timeout_s`` seconds.

        Returns the number of servers that were told, or ``None`` where no server can be told. A call that was stopped
        returns with ``finish_reason`` ``abort``.
        """
        return None

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:  # noqa: ARG002 - the default cannot abort
        """Stop every call of the server, other clients' too. Returns as ``abort`` does."""
        return None

    async def wait_available(self, timeout_s: float | None = None) -> None:
        """Return as soon as the server takes requests; ``None`` waits for ever.

        Asks at once and then at growing distances, up to 5 s. Raises ``EngineUnavailable`` after ``timeout_s`` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._probe_until_available()
        except TimeoutError:
            raise EngineUnavailable(
                f"no engine at {self.url} took requests within {timeout_s:g} s", hint="start it, or check the address"
            ) from None

    async def _probe_until_available(self) -> None:
        pause_s = PROBE_FIRST_S
        while not await self.is_available():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PROBE_MAX_S)


def sum_told(counts: Iterable[int | None]) -> int | None:
    """The servers told by several aborts; ``None`` if none of them could tell anybody."""
    told = [count for count in counts if count is not None]
    return sum(told) if told else None
