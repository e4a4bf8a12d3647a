"""How a scripted reply is said: token by token over its time, with pauses, aborts and new weights in the middle."""

import asyncio
from collections.abc import Callable, Sequence

from forebay.engines.fake_sglang.backend import FIRST_VERSION
from forebay.engines.scripted.script import Reply, ScriptedCall
from forebay.engines.scripted.tokens import TURN_START

TICK_S = 0.005
ROUNDING = 1e-6
"""Of a token: a sleep that ends at its very moment has lasted long enough."""
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
        # One that hangs comes by here again: it ends by an abort only.
        if start == len(plan) and not call.reply.hang:
            break
        num_said, due_s = await _say_some(call, plan, weights, due_s)
        if num_said:
            call.sampled_ids += plan[start : start + num_said]
            call.versions += [weights.version] * num_said
            notify()
    call.finished = call.reply.reason if plan == whole else "length"


async def _say_some(call: ScriptedCall, plan: list[int], weights: ScriptedWeights, due_s: float) -> tuple[int, float]:
    """Wait for the next tokens to be said; how many there are, and when the last of them was due.

    ``due_s`` is when the token before them was. Sleeps that last too long do not add up: what is late is said at once.
    """
    start = len(call.sampled_ids)
    if start == len(plan):
        await weights.interrupted(call, None)
        return 0, due_s
    interval_s = _interval_s(call.reply, len(plan))
    if not interval_s:
        # A stream without a speed comes word by word, in as many chunks as a real one.
        return (_word(plan, start) if call.body.get("stream") else len(plan) - start), due_s
    # Several tokens a tick where it is fast: a sleep is seldom much shorter than this.
    num_next = min(len(plan) - start, max(1, round(TICK_S / interval_s)))
    loop = asyncio.get_running_loop()
    await weights.interrupted(call, max(0.0, due_s + num_next * interval_s - loop.time()))
    # Interrupted: only what was due by now is said.
    num_due = int((loop.time() - due_s) / interval_s + ROUNDING)
    num_said = max(0, min(num_due, len(plan) - start))
    return num_said, due_s + num_said * interval_s


def _interval_s(reply: Reply, num_tokens: int) -> float:
    return 1 / reply.tokens_per_s if reply.tokens_per_s else reply.delay_s / max(1, num_tokens)


def _word(plan: list[int], start: int) -> int:
    """How many tokens there are up to the next space or mark."""
    ends = (at for at in range(start + 1, len(plan)) if plan[at] == SPACE or plan[at] >= TURN_START)
    return next(ends, len(plan)) - start
