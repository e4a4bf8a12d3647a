"""A rollout stays on one engine: what it has asked before is in that engine's cache."""

from forebay.engines.balance import Member
from forebay.generators.engine_ring import EngineRing, Target

OVERLOAD_FACTOR = 2
OVERLOAD_CALLS = 8
"""An engine is overloaded with more calls than ``OVERLOAD_FACTOR`` times those of the least loaded one plus these."""


class Affinity:
    """The engine that the calls of one rollout go to, as long as it answers and is not overloaded."""

    def __init__(self, ring: EngineRing) -> None:
        self._ring = ring
        self._held: Member[Target] | None = None

    async def choose(self) -> Member[Target]:
        """The engine for the next call. Waits while none answers."""
        least = await self._ring.take()
        held = self._held
        if held is None or held.failures or _is_overloaded(held, least):
            self._held = least
        assert self._held is not None
        return self._held


def _is_overloaded(held: Member[Target], least: Member[Target]) -> bool:
    return held.in_flight > OVERLOAD_FACTOR * least.in_flight + OVERLOAD_CALLS
