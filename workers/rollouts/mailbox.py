"""What a worker is sent and sends, between the event loop of its calls and the thread of the user's code."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from forebay.workers.members.loop_pulse import LoopPulse
from forebay.workers.rollouts.messages import LoopBlocked, ToLead, ToWorker, encode, for_worker

GATHER_S = 0.001
"""So long news wait for others: a rollout that ends has several."""
BATCH_EVERY_S = 0.01
"""A busy worker sends a batch, and takes one, so often at most: one costs both sides more than what is in it."""
LOOK_EVERY_S = 1.0
BLOCKED_S = 5.0
"""A loop that stands still for so long is told of."""


class Mailbox:
    """Messages wait here until the other side takes them. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incoming: list[ToWorker] = []
        self._outgoing: list[ToLead] = []
        self._reader: _Waiter | None = None
        self._lead: _Waiter | None = None
        self._pulse: LoopPulse | None = None
        self._looked_s = 0.0
        self._sent_s = 0.0
        self._is_blocked = False

    def watch(self, pulse: LoopPulse | None) -> None:
        """From now on the lead hears of it when this loop stands still."""
        self._pulse = pulse

    # --- for the lead

    def put(self, batch: bytes) -> None:
        """The lead has sent these."""
        messages = for_worker(batch)
        with self._lock:
            self._incoming += messages
            waiter, self._reader = self._reader, None
        if waiter is not None:
            waiter.wake()

    async def news(self) -> bytes:
        """A batch of what was posted, once there is something."""
        self._look()
        while not await self._has_news():
            self._look()
        await asyncio.sleep(max(GATHER_S, self._sent_s + BATCH_EVERY_S - time.monotonic()))
        self._sent_s = time.monotonic()
        with self._lock:
            messages, self._outgoing = self._outgoing, []
        return encode(messages)

    async def _has_news(self) -> bool:
        with self._lock:
            if self._outgoing:
                return True
            waiter = self._lead = _Waiter()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await waiter.wait()
        return bool(self._outgoing)

    def _look(self) -> None:
        """Post what there is to say of the loop."""
        now_s = time.monotonic()
        if self._pulse is None or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        seconds, line = self._pulse.blocked()
        if seconds >= BLOCKED_S:
            self._is_blocked = True
            self.post(LoopBlocked(seconds, line))
        elif self._is_blocked:
            self._is_blocked = False
            self.post(LoopBlocked(0.0, ""))

    # --- for the job

    def post(self, message: ToLead) -> None:
        """Send one to the lead."""
        with self._lock:
            self._outgoing.append(message)
            waiter, self._lead = self._lead, None
        if waiter is not None:
            waiter.wake()

    async def take(self) -> Sequence[ToWorker]:
        """What the lead has sent, once there is something."""
        with self._lock:
            waiter = self._reader = _Waiter() if not self._incoming else None
        if waiter is not None:
            await waiter.wait()
        with self._lock:
            messages, self._incoming = self._incoming, []
        return messages

    def give_back(self, messages: Sequence[ToWorker]) -> None:
        """These are for whoever takes messages next."""
        with self._lock:
            self._incoming[:0] = messages


class _Waiter:
    """Waits in one event loop, and is woken from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    async def wait(self) -> None:
        await self._future

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self._future.done():
            self._future.set_result(None)
