"""Several engines as one: the least loaded first, another one when one fails."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from forebay.core.clock import Clock
from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.engines.abc import ABORT_TIMEOUT_S, ChatReply, ChatRequest, Engine, EngineLoad, ModelInfo, sum_told
from forebay.engines.balance import Member, ask_in_turn
from forebay.engines.detect import DetectedEngine


class EnginePool(Engine):
    """The engines at ``urls``, each of whatever kind answers there.

    A call goes to the engine with the fewest calls in flight; on ``EngineUnavailable`` to the next. An engine that
    failed rests, 0.5 s at first and up to 30 s, and is asked last meanwhile. ``EngineUnavailable`` is raised when none
    answers: ``wait_available`` then returns as soon as one does, however many wait.
    """

    def __init__(
        self, urls: Sequence[str], *, api_key: str | None = None, model: str | None = None, clock: Clock | None = None
    ) -> None:
        if isinstance(urls, str) or not urls:
            raise InvalidInput("a pool needs a list of at least one engine address", field="urls")
        # One address written twice would get twice the load.
        engines = {engine.url: engine for engine in (DetectedEngine(url, api_key=api_key, model=model) for url in urls)}
        self.url = ",".join(engines)
        self._members = [Member(engine, clock) for engine in engines.values()]
        self._stack = AsyncExitStack()
        self._probing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        for member in self._members:
            await self._stack.enter_async_context(member.server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def in_flight(self) -> dict[str, int]:
        """The calls of this pool in flight, by address."""
        return {member.server.url: member.in_flight for member in self._members}

    async def chat(self, request: ChatRequest) -> ChatReply:
        async with asyncio.timeout(request.timeout_s):
            return await ask_in_turn(self._members, lambda engine: engine.chat(request))

    async def model_info(self) -> ModelInfo:
        return await ask_in_turn(self._members, lambda engine: engine.model_info())

    async def load(self) -> EngineLoad | None:
        """The load of those that tell theirs. Raises ``EngineUnavailable`` when none answers."""
        results = await asyncio.gather(*(self._load_of(member.server) for member in self._members))
        failures = [result for result in results if isinstance(result, EngineError)]
        if len(failures) == len(results):
            raise failures[-1]
        told = [result for result in results if isinstance(result, EngineLoad)]
        return sum(told, EngineLoad()) if told else None

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        aborts = (member.server.abort(rid_prefix, timeout_s=timeout_s) for member in self._members)
        return sum_told(await asyncio.gather(*aborts))

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        aborts = (member.server.abort_all(timeout_s=timeout_s) for member in self._members)
        return sum_told(await asyncio.gather(*aborts))

    async def is_available(self) -> bool:
        """True at once if an engine's last call was answered; else all are asked, by one caller at a time."""
        async with self._probing:
            if any(member.answered for member in self._members):
                return True
            return any(await asyncio.gather(*map(_probe, self._members)))

    @staticmethod
    async def _load_of(engine: Engine) -> EngineLoad | EngineError | None:
        try:
            return await engine.load()
        except EngineError as error:
            return error
        except TimeoutError as error:
            return EngineUnavailable(str(error))


async def _probe(member: Member[DetectedEngine]) -> bool:
    if not await member.server.is_available():
        member.failed()
        return False
    member.recovered()
    return True
