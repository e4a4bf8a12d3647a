"""The concurrency slot of a rollout while it runs: what policies see of it, and what it may sample there."""

import asyncio

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, RolloutKey


class RolloutSlot:
    """Counts one rollout in the loads of its run: on its engine from the moment at which it was chosen until ``leave``,
    and among those that run from ``begin`` on.
    """

    def __init__(self, chosen: NextRollout, loads: EngineLoads) -> None:
        self.rollout: RolloutKey = chosen.rollout
        self.preferred = chosen.engine
        """The engine that its policy chose; it goes to another one where that does not answer."""
        self.cap_tokens = chosen.cap_tokens
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
        """It runs no more, or will not."""
        self.move(None)
        self._is_left = True
        if self._begun_s is not None:
            self._loads.leave()
