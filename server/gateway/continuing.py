"""Going on with an answer that an engine aborted, for a weight update say: agents never see an abort."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from forebay.core.errors import EngineError
from forebay.engines.admin import WorkerAdmin
from forebay.engines.capture.turn import Turn
from forebay.engines.seams import Whole, whole_message
from forebay.generators.chat_parts import Part
from forebay.generators.continuing import Join, Rest, finish
from forebay.server.gateway.refusals import EngineLost

Json = dict[str, Any]
Ask = Callable[[Json], Awaitable[Part]]
"""Asks an engine for a whole chat completion."""


class Continuation:
    """The rest of one choice, gone on with as rollout functions' own calls are.

    ``body`` is the chat that was asked for, ``turn`` what came of it before the abort. ``http`` are connections for
    administrative calls.
    """

    def __init__(self, ask: Ask, http: httpx.AsyncClient, body: Json, turn: Turn) -> None:
        self._ask = ask
        self._http = http
        self._rest = Rest(body, turn)

    @property
    def logprobs(self) -> list[Json]:
        """What the parts after the first told beside each token, as chats tell it."""
        return self._rest.parts.logprobs

    async def run(self) -> Turn:
        """The whole turn, with its message. Raises ``EngineLost`` if the engine aborts again and again."""
        try:
            return await finish(self._rest, self._ask, self._joined)
        except EngineError as error:
            raise EngineLost(error.message) from error

    async def _joined(self, join: Join) -> Whole | None:
        return await whole_message(WorkerAdmin(self._http, join.turn.engine_url), join.turn, join.body)
