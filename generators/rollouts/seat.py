"""The place that a rollout has while it runs: what policies see of it, and what it may sample there."""

import asyncio
from collections.abc import Callable

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, RolloutKey
from forebay.core.waiting import Signal


class Seat:
    """Counts one rollout in the loads of its run: on its engine from the moment at which it was chosen until ``leave``,
    and among those that run from ``begin`` on.
    """

    def __init__(self, chosen: NextRollout, loads: EngineLoads) -> None:
        self.rollout: RolloutKey = chosen.rollout
        self.preferred = chosen.engine
        """The engine that its policy chose; it goes to another one where that does not answer."""
        self.cap_tokens = chosen.cap_tokens
        self.on_wait: Callable[[], None] | None = None
        """Told when the rollout has come to its cap, and waits to be chosen again; None where it does not go on so."""
        self.is_waiting = False
        self.num_chosen = 1
        """How often a place was chosen for it."""
        self._news = Signal()
        self._loads = loads
        self._url = chosen.engine
        self._begun_s: float | None = None
        self._is_left = False
        loads.move(None, self._url)

    def begin(self) -> None:
        """It runs from now on."""
        self._begun_s = asyncio.get_running_loop().time()
        self._loads.enter()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return 0.0 if self._begun_s is None else asyncio.get_running_loop().time() - self._begun_s

    def move(self, url: str | None) -> None:
        """It runs on another engine now, or on none: it is being judged, say."""
        if not self._is_left and url != self._url:
            self._loads.move(self._url, url)
            self._url = url

    def leave(self) -> None:
        """It runs no more, or will not. May be told twice."""
        if not self._is_left:
            self.move(None)
            self._is_left = True
            if self._begun_s is not None:
                self._loads.leave()

    def give_up(self) -> None:
        """It waits from now on to be chosen again, to go on. May be told twice."""
        if not self.is_waiting and self.on_wait is not None:
            self.is_waiting = True
            self.leave()
            self.on_wait()

    def go_on(self, chosen: "Seat") -> None:
        """It was chosen again: the place is that of ``chosen``, which runs already, and is not to be used any more."""
        self.preferred, self.cap_tokens = chosen.preferred, chosen.cap_tokens
        self._url, self._begun_s, self._is_left = chosen._url, chosen._begun_s, False
        self.is_waiting = False
        self.num_chosen += 1
        self._news.notify()

    async def wait(self) -> None:
        """Return when it does not wait any more."""
        while self.is_waiting:
            await self._news.wait()
