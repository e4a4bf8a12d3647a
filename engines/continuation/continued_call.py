"""Continue a choice that an engine aborted, for example for a weight update, until it is complete."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError
from forebay.engines.capture.turn import ABORTED, Turn, cut
from forebay.engines.continuation.message import Whole
from forebay.engines.continuation.parts import Json, Part, Parts

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_EMPTY_PARTS = 10
"""Consecutive aborts before the first token after which a call fails: with the pauses, about half a minute."""


@dataclass(frozen=True)
class Join:
    """A cut turn whose message is to be read from all its tokens, and the requested chat."""

    turn: Turn
    body: Json


class Rest:
    """The rest of one choice. ``body`` is the requested chat, ``turn`` its result before the abort."""

    def __init__(self, body: Mapping[str, Any], turn: Turn) -> None:
        self.parts = Parts(body, turn)
        self.choice = turn.choice
        self.turn: Turn = turn
        """Everything received so far; at the end, the whole turn with its message."""
        self._pause = Backoff(0.25, 5.0)
        self._num_empty = 0

    @property
    def turns(self) -> list[Turn]:
        """Turns to record now: the dropped parts, and the turn."""
        return [*self.parts.dropped, *([] if self.parts.turn is None else [self.turn])]

    async def finish(
        self,
        ask: Callable[[Json], Awaitable[Part]],
        join: Callable[[Join], Awaitable[Whole | None]],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> Turn:
        """Return the whole turn: ``ask`` requests a chat, ``join`` reads the message of a cut turn, None if it cannot.

        Raises ``EngineError`` if the engine keeps aborting, and the errors of ``ask``.
        """
        parts = self.parts
        while self.turn.finish_reason == ABORTED and not parts.is_budget_spent:
            if pause_s := self._prepare():
                await pause(pause_s)
            self._add(await ask(parts.request()))
        if self.turn.finish_reason == ABORTED:
            self.turn = msgspec.structs.replace(self.turn, finish_reason="length")
        # A character, a stop string or a tool call may lie across a cut: the message is read from all tokens.
        if len(parts.texts) > 1 and parts.is_by_ids and (whole := await join(Join(self.turn, parts.body))) is not None:
            kept = cut(self.turn, whole.num_tokens)
            self.turn = msgspec.structs.replace(kept, reply=whole.message, finish_reason=whole.finish_reason)
        return self.turn

    def _add(self, part: Part) -> None:
        parts = self.parts
        if not parts.add(part):
            logger.warning("the engine cannot continue from token ids; the turn is continued from its text")
        elif parts.turn is not None:
            reason = parts.turn.finish_reason or "stop"  # some servers send null
            self.turn = msgspec.structs.replace(parts.turn, choice=self.choice, finish_reason=reason)

    def _prepare(self) -> float:
        """Drop tokens that cannot be continued. Returns the pause before the next part, in seconds."""
        parts = self.parts
        is_empty = parts.is_last_empty or parts.must_restart
        # An engine that is being updated may abort many calls in a row before their first token.
        self._num_empty = self._num_empty + 1 if is_empty else 0
        if self._num_empty >= MAX_EMPTY_PARTS:
            raise EngineError("the engine aborts every call before its first token, or before its end", status_code=200)
        if parts.must_restart and (num_dropped := parts.drop()):
            logger.info("an aborted reply (images, or a grammar) is requested again, %d tokens dropped", num_dropped)
        return self._pause.next_s() if self._num_empty > 1 else 0.0


def ended_at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine in which nothing waits, in a thread without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a coroutine waits for an event loop")
