"""The concurrency slot of a running rollout: its load as seen by policies, and its token cap."""

import asyncio

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, RolloutKey


class RolloutSlot:
    """Counts one rollout in the run's loads: on its engine until ``leave``, and as running from ``begin`` on."""

    def __init__(self, chosen: NextRollout, loads: EngineLoads) -> None:
        self.rollout: RolloutKey = chosen.rollout
        self.preferred = chosen.engine
        """The engine chosen by the policy; another one is used if it does not answer."""
        self.cap_tokens = chosen.cap_tokens
        self._loads = loads
        self._url = chosen.engine
        self._begun_s: float | None = None
        self._is_left = False
        loads.move(None, self._url)

    def begin(self) -> None:
        """Count the rollout as running."""
        self._begun_s = asyncio.get_running_loop().time()
        self._loads.enter()

    @property
    def seconds(self) -> float:
        """Seconds since ``begin``."""
        return 0.0 if self._begun_s is None else asyncio.get_running_loop().time() - self._begun_s

    def move(self, url: str | None) -> None:
        """Move the load to another engine, or to none, for example while the reward is computed."""
        if not self._is_left and url != self._url:
            self._loads.move(self._url, url)
            self._url = url

    def leave(self) -> None:
        """Release the slot."""
        self.move(None)
        self._is_left = True
        if self._begun_s is not None:
            self._loads.leave()
