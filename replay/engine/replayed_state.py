"""What a recorded engine keeps of its administration: whether it is paused, and what its weights are called."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forebay.core.waiting import Signal
from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.request_bodies import WeightsBody


class AnswerInFlight:
    """One call that is being answered. What aborts it finds it at its end: the rest of its answer goes at once."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._is_hurried = asyncio.Event()

    def hurry(self) -> None:
        """Wait for nothing any more."""
        self._is_hurried.set()

    async def until(self, due_s: float) -> None:
        """Return at ``due_s`` by the loop's clock."""
        if due_s > asyncio.get_running_loop().time():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._is_hurried.wait()


class ReplayedState:
    """Behind ``Administration``."""

    def __init__(self) -> None:
        self.weight_version: str | None = None
        """What the weights were called last; None where nobody said: they have their recorded name."""
        self._in_flight: set[AnswerInFlight] = set()
        self._mode: PauseMode | None = None
        self._num_updates = 0
        """Updates of the weights that wait for calls to end."""
        self._changed = Signal()
        self._is_stopping = False

    @property
    def num_in_flight(self) -> int:
        """Calls that are being answered. Those that wait for the end of a pause are none."""
        return len(self._in_flight)

    async def opened(self) -> None:
        """Return when nothing is paused, and no update of the weights waits."""
        while (self._mode is not None or self._num_updates) and not self._is_stopping:
            await self._changed.wait()

    @contextmanager
    def answering(self, rid: str) -> Iterator[AnswerInFlight]:
        """Around a call."""
        call = AnswerInFlight(rid)
        self._in_flight.add(call)
        try:
            yield call
        finally:
            self._in_flight.discard(call)
            self._changed.notify()

    def stop(self) -> None:
        """Let every call come to its end at once."""
        self._is_stopping = True
        self.abort("")
        self._changed.notify()

    def abort(self, rid_prefix: str) -> None:
        """The calls whose ``rid`` begins so had just come to their ends."""
        for call in self._in_flight:
            if call.rid.startswith(rid_prefix):
                call.hurry()

    async def pause(self, mode: PauseMode) -> None:
        """Begin no answer; with ``abort`` it returns when all those that were begun are at their ends."""
        self._mode = mode
        if mode == "abort":
            self.abort("")
            await self._ended()

    async def resume(self) -> None:
        """Go on after a pause."""
        self._mode = None
        self._changed.notify()

    async def update_weights(self, body: WeightsBody) -> None:
        """Their new name counts from now on; outside of a pause, when the calls being answered have ended.

        Calls that come meanwhile wait behind it, as they do in SGLang.
        """
        if self._mode is None:
            self._num_updates += 1
            try:
                await self._ended()
            finally:
                self._num_updates -= 1
                self._changed.notify()
        self.weight_version = body.weight_version or self.weight_version

    async def name_weights(self, version: str) -> None:
        """They are called so from now on."""
        self.weight_version = version

    async def flush_cache(self) -> None:
        """There is none."""

    async def _ended(self) -> None:
        """Return when the calls that are being answered now have ended; what waits for no pause may go on coming."""
        calls = set(self._in_flight)
        while calls & self._in_flight:
            await self._changed.wait()
