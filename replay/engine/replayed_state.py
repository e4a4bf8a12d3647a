"""The simulated administration of a recorded engine: whether it is paused, and the name of its weights."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forebay.core.waiting import Signal
from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.request_bodies import WeightsBody


class AnswerInFlight:
    """One call being answered. An abort finds it complete: the rest of its answer is sent at once."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._is_hurried = asyncio.Event()

    def hurry(self) -> None:
        """Skip all further delays."""
        self._is_hurried.set()

    async def until(self, due_s: float) -> None:
        """Return at ``due_s`` by the loop's clock, or earlier if hurried."""
        if due_s > asyncio.get_running_loop().time():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._is_hurried.wait()


class ReplayedState:
    """The engine state that ``Administration`` acts on."""

    def __init__(self) -> None:
        self.weight_version: str | None = None
        """The last name set for the weights; None until a client sets one: replies keep the recorded name."""
        self._in_flight: set[AnswerInFlight] = set()
        self._mode: PauseMode | None = None
        self._num_updates = 0
        """Weight updates that wait for calls to end."""
        self._changed = Signal()
        self._is_stopping = False

    @property
    def num_in_flight(self) -> int:
        """Calls being answered, without those that wait for the end of a pause."""
        return len(self._in_flight)

    async def opened(self) -> None:
        """Return when neither a pause nor a weight update is in effect."""
        while (self._mode is not None or self._num_updates) and not self._is_stopping:
            await self._changed.wait()

    @contextmanager
    def answering(self, rid: str) -> Iterator[AnswerInFlight]:
        """Track a call while it is being answered."""
        call = AnswerInFlight(rid)
        self._in_flight.add(call)
        try:
            yield call
        finally:
            self._in_flight.discard(call)
            self._changed.notify()

    def stop(self) -> None:
        """End all calls at once."""
        self._is_stopping = True
        self.abort("")
        self._changed.notify()

    def abort(self, rid_prefix: str) -> None:
        """End the calls whose ``rid`` starts with this prefix, as if they had just completed."""
        for call in self._in_flight:
            if call.rid.startswith(rid_prefix):
                call.hurry()

    async def pause(self, mode: PauseMode) -> None:
        """Start no more answers. With ``abort``, return when all answers already started have ended."""
        self._mode = mode
        if mode == "abort":
            self.abort("")
            await self._ended()

    async def resume(self) -> None:
        """End the pause."""
        self._mode = None
        self._changed.notify()

    async def update_weights(self, body: WeightsBody) -> None:
        """Set the new name. Outside a pause, first wait until the calls being answered have ended.

        Calls that arrive meanwhile wait for the update, as in SGLang.
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
        """Set the name of the weights."""
        self.weight_version = version

    async def flush_cache(self) -> None:
        """Do nothing: a recorded engine has no cache."""

    async def _ended(self) -> None:
        """Return when the calls being answered now have ended, whether or not new ones arrive."""
        calls = set(self._in_flight)
        while calls & self._in_flight:
            await self._changed.wait()
