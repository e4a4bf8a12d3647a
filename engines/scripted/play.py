"""Emit a scripted reply token by token over its duration, subject to pauses, aborts and weight updates."""

import asyncio
from collections.abc import Callable, Sequence

from forebay.engines.fake_sglang.backend import FIRST_VERSION
from forebay.engines.scripted.script import Reply, ScriptedCall
from forebay.engines.scripted.tokens import TURN_START

TICK_S = 0.005
ROUNDING = 1e-6
"""Rounding tolerance, in tokens: a sleep that ends exactly when a token is due was long enough."""
SPACE = ord(" ")


class ScriptedWeights:
    """The simulated weight version of a scripted engine, and whether it is paused."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self.mode: str | None = None
        """``abort``, ``retract`` or ``in_place`` while generation is paused."""
        self._open = asyncio.Event()
        self._open.set()
        self._paused = asyncio.Event()

    def pause(self, mode: str) -> None:
        """Stop emitting tokens."""
        self.mode = mode
        self._open.clear()
        self._paused.set()

    def resume(self) -> None:
        """Resume emitting tokens."""
        self.mode = None
        self._paused.clear()
        self._open.set()

    async def opened(self) -> None:
        """Return once generation is not paused."""
        await self._open.wait()

    async def may_go_on(self, call: ScriptedCall) -> None:
        """Return once ``call`` may continue or end. An aborted call ends at once, except while paused in place."""
        if self.mode == "retract":
            call.num_retractions += 1
        while self.mode is not None:
            waits = [self._open] if self.mode == "in_place" else [self._open, call.aborted]
            await first_of(waits)
            if call.aborted.is_set() and self.mode != "in_place":
                return

    async def interrupted(self, call: ScriptedCall, timeout_s: float | None) -> None:
        """Return after ``timeout_s`` seconds, or when the call is aborted or generation is paused."""
        await first_of([call.aborted, self._paused], timeout_s)


async def first_of(events: Sequence[asyncio.Event], timeout_s: float | None = None) -> None:
    """Return once one of the events is set, or after ``timeout_s`` seconds."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def play(call: ScriptedCall, weights: ScriptedWeights, notify: Callable[[], None]) -> None:
    """Emit the reply of ``call``, calling ``notify`` after each step; sets ``call.finished`` at the end."""
    whole = call.reply.tokens()
    plan = whole[: call.limit]
    now = asyncio.get_running_loop().time
    due_s = now()
    while True:
        is_paused = weights.mode is not None
        await weights.may_go_on(call)
        if call.aborted.is_set():
            call.finished = "abort"
            return
        due_s = now() if is_paused else due_s
        start = len(call.sampled_ids)
        # A hanging reply stays in the loop: only an abort ends it.
        if start == len(plan) and not call.reply.hang:
            break
        num_said, due_s = await _say_some(call, plan, weights, due_s)
        if num_said:
            call.sampled_ids += plan[start : start + num_said]
            call.versions += [weights.version] * num_said
            notify()
    call.finished = call.reply.reason if plan == whole else "length"


async def _say_some(call: ScriptedCall, plan: list[int], weights: ScriptedWeights, due_s: float) -> tuple[int, float]:
    """Wait until more tokens are due. Returns how many to emit, and when the last of them was due.

    ``due_s`` is when the token before them was due. Oversleeping does not accumulate: late tokens are emitted at once.
    """
    start = len(call.sampled_ids)
    if start == len(plan):
        await weights.interrupted(call, None)
        return 0, due_s
    interval_s = _interval_s(call.reply, len(plan))
    if not interval_s:
        # A stream without a speed is sent word by word, in as many chunks as a real one.
        return (_word(plan, start) if call.body.get("stream") else len(plan) - start), due_s
    # Emit several tokens per tick at high speeds, because sleeps are rarely much shorter than a tick.
    num_next = min(len(plan) - start, max(1, round(TICK_S / interval_s)))
    loop = asyncio.get_running_loop()
    await weights.interrupted(call, max(0.0, due_s + num_next * interval_s - loop.time()))
    # If interrupted, emit only the tokens due by now.
    num_due = int((loop.time() - due_s) / interval_s + ROUNDING)
    num_said = max(0, min(num_due, len(plan) - start))
    return num_said, due_s + num_said * interval_s


def _interval_s(reply: Reply, num_tokens: int) -> float:
    return 1 / reply.tokens_per_s if reply.tokens_per_s else reply.delay_s / max(1, num_tokens)


def _word(plan: list[int], start: int) -> int:
    """Number of tokens up to the next space or special token."""
    ends = (at for at in range(start + 1, len(plan)) if plan[at] == SPACE or plan[at] >= TURN_START)
    return next(ends, len(plan)) - start
