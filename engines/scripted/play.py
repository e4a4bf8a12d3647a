"""How a scripted reply is said: token by token over its time, with pauses, aborts and new weights in the middle."""

import asyncio
from collections.abc import Callable, Sequence

from forebay.engines.fake_sglang.backend import FIRST_VERSION
from forebay.engines.scripted.script import Reply, ScriptedCall
from forebay.engines.scripted.tokens import TURN_START

TICK_S = 0.005
SPACE = ord(" ")


class ScriptedWeights:
    """The weights that a scripted engine says it has, and whether it is paused."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self.mode: str | None = None
        """``abort``, ``retract`` or ``in_place`` while generation is paused."""
        self._open = asyncio.Event()
        self._open.set()
        self._paused = asyncio.Event()

    def pause(self, mode: str) -> None:
        """Stop saying tokens."""
        self.mode = mode
        self._open.clear()
        self._paused.set()

    def resume(self) -> None:
        """Go on."""
        self.mode = None
        self._paused.clear()
        self._open.set()

    async def opened(self) -> None:
        """Return while generation is not paused."""
        await self._open.wait()

    async def may_go_on(self, call: ScriptedCall) -> None:
        """Return when ``call`` may say more or end. An aborted one ends at once, but not while paused in place."""
        if self.mode == "retract":
            call.num_retractions += 1
        while self.mode is not None:
            waits = [self._open] if self.mode == "in_place" else [self._open, call.aborted]
            await first_of(waits)
            if call.aborted.is_set() and self.mode != "in_place":
                return

    async def interrupted(self, call: ScriptedCall, timeout_s: float | None) -> None:
        """Return after the time, or as soon as the call is aborted or generation is paused."""
        await first_of([call.aborted, self._paused], timeout_s)


async def first_of(events: Sequence[asyncio.Event], timeout_s: float | None = None) -> None:
    """Return when one of the events is set, or after ``timeout_s`` seconds."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def play(call: ScriptedCall, weights: ScriptedWeights, notify: Callable[[], None]) -> None:
    """Say the reply of ``call``, with ``notify`` after each step of it; ends with ``call.finished`` set."""
    whole = call.reply.tokens()
    plan = whole[: call.limit]
    while True:
        await weights.may_go_on(call)
        if call.aborted.is_set():
            call.finished = "abort"
            return
        start = len(call.sampled_ids)
        # One that hangs comes by here again: it ends by an abort only.
        if start == len(plan) and not call.reply.hang:
            break
        num_said = await _say_some(call, plan, weights)
        if num_said:
            call.sampled_ids += plan[start : start + num_said]
            call.versions += [weights.version] * num_said
            notify()
    call.finished = call.reply.reason if plan == whole else "length"


async def _say_some(call: ScriptedCall, plan: list[int], weights: ScriptedWeights) -> int:
    """Wait for the next tokens to be said; how many there are."""
    start = len(call.sampled_ids)
    if start == len(plan):
        await weights.interrupted(call, None)
        return 0
    interval_s = _interval_s(call.reply, len(plan))
    if not interval_s:
        # A stream without a speed comes word by word, in as many chunks as a real one.
        return _word(plan, start) if call.body.get("stream") else len(plan) - start
    # Several tokens a tick where it is fast: a sleep is seldom much shorter than this.
    num_due = min(len(plan) - start, max(1, round(TICK_S / interval_s)))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await weights.interrupted(call, num_due * interval_s)
    # Interrupted: only what was due by now is said.
    if call.aborted.is_set() or weights.mode is not None:
        return min(num_due, int((loop.time() - began_s) / interval_s))
    return num_due


def _interval_s(reply: Reply, num_tokens: int) -> float:
    return 1 / reply.tokens_per_s if reply.tokens_per_s else reply.delay_s / max(1, num_tokens)


def _word(plan: list[int], start: int) -> int:
    """How many tokens there are up to the next space or mark."""
    ends = (at for at in range(start + 1, len(plan)) if plan[at] == SPACE or plan[at] >= TURN_START)
    return next(ends, len(plan)) - start
