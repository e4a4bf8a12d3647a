"""Continue a choice that an engine aborted, for example for a weight update, until it is complete."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError
from forebay.engines.capture.turn import ABORTED, Turn, cut
from forebay.engines.continuation.message import Whole
from forebay.engines.continuation.parts import Json, Part, Parts

logger = logging.getLogger(__name__)

MAX_EMPTY_PARTS = 10
"""Consecutive aborts before the first token after which a call fails: with the pauses, about half a minute."""


@dataclass(frozen=True)
class Ask:
    """Request a whole chat with this body. The answer is a ``Part``."""

    body: Json


@dataclass(frozen=True)
class Join:
    """Read the message of a cut turn from all its tokens. The answer is a ``Whole``, or None."""

    turn: Turn
    body: Json


Pause = float
Step: TypeAlias = Ask | Join | Pause
Answer: TypeAlias = Part | Whole | None


class Rest:
    """The rest of one choice. ``body`` is the requested chat, ``turn`` its result before the abort.

    The caller does the I/O of the ``steps``, with ``finish`` or ``finish_in_thread``.
    """

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

    def steps(self) -> Generator[Step, Answer, Turn]:
        """Yield the steps one by one; each is sent its answer. Returns the whole turn.

        Raises ``EngineError`` if the engine keeps aborting.
        """
        parts = self.parts
        while self.turn.finish_reason == ABORTED and not parts.is_budget_spent:
            if pause_s := self._prepare():
                yield pause_s
            self._add((yield Ask(parts.request())))
        if self.turn.finish_reason == ABORTED:
            self.turn = msgspec.structs.replace(self.turn, finish_reason="length")
        # A character, a stop string or a tool call may lie across a cut: the message is read from all tokens.
        if len(parts.texts) > 1 and parts.is_by_ids:
            whole = yield Join(self.turn, parts.body)
            if isinstance(whole, Whole):
                kept = cut(self.turn, whole.num_tokens)
                self.turn = msgspec.structs.replace(kept, reply=whole.message, finish_reason=whole.finish_reason)
        return self.turn

    def _add(self, answer: Answer) -> None:
        assert isinstance(answer, Part)
        parts = self.parts
        if not parts.add(answer):
            logger.warning("the engine cannot continue from token ids; the turn is continued from its text")
        elif parts.turn is not None:
            reason = parts.turn.finish_reason or "stop"  # some servers send null
            self.turn = msgspec.structs.replace(parts.turn, choice=self.choice, finish_reason=reason)

    def _prepare(self) -> Pause:
        """Drop tokens that cannot be continued. Returns the pause before the next part, in seconds."""
        parts = self.parts
        is_empty = parts.is_last_empty or parts.is_grammar_bound
        # An engine that is being updated may abort many calls in a row before their first token.
        self._num_empty = self._num_empty + 1 if is_empty else 0
        if self._num_empty >= MAX_EMPTY_PARTS:
            raise EngineError("the engine aborts every call before its first token, or before its end", status_code=200)
        if parts.is_grammar_bound and (num_dropped := parts.drop()):
            logger.info("an aborted reply bound to a grammar is requested again (%d tokens dropped)", num_dropped)
        return self._pause.next_s() if self._num_empty > 1 else 0.0


async def finish(
    rest: Rest,
    ask: Callable[[Json], Awaitable[Part]],
    join: Callable[[Join], Awaitable[Whole | None]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Turn:
    """Run the steps of ``rest`` to the end. Raises the errors of ``rest`` and ``ask``."""
    steps = rest.steps()
    answer: Answer = None
    while (step := _next(steps, answer)) is not None:
        if isinstance(step, Ask):
            answer = await ask(step.body)
        elif isinstance(step, Join):
            answer = await join(step)
        else:
            await pause(step)
            answer = None
    return rest.turn


def finish_in_thread(
    rest: Rest,
    ask: Callable[[Json], Part],
    join: Callable[[Join], Whole | None],
    pause: Callable[[float], None] = time.sleep,
) -> Turn:
    """Synchronous version of ``finish``."""
    steps = rest.steps()
    answer: Answer = None
    while (step := _next(steps, answer)) is not None:
        if isinstance(step, Ask):
            answer = ask(step.body)
        elif isinstance(step, Join):
            answer = join(step)
        else:
            pause(step)
            answer = None
    return rest.turn


def _next(steps: Generator[Step, Answer, Turn], answer: Answer) -> Step | None:
    """Return the next step, or None after the last one."""
    try:
        return steps.send(answer)
    except StopIteration:
        return None
