"""Chooses the engines for a run's long rollouts, and updates the choice as engines come and go."""

import math
from collections.abc import Sequence

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads

FIELD = "scheduler.heavy"


class HeavyEngines:
    """Splits the engines that answer into heavy and fast ones.

    ``setting`` names the heavy engines, or is their share: then they are the first ones of the list, at least one. If
    none of the named engines answers, the same number of others replaces them.
    """

    def __init__(self, setting: Sequence[str] | float) -> None:
        self._named = None if isinstance(setting, float) else tuple(dict.fromkeys(setting))
        self._share = setting if isinstance(setting, float) else 0.0
        self._seen: tuple[str, ...] | None = None
        self.heavy: frozenset[str] = frozenset()
        self.fast: frozenset[str] = frozenset()
        """Empty if a single engine is left, or if all are heavy."""

    def update(self, loads: EngineLoads) -> bool:
        """Split the engines that answer now. Returns whether the split has changed.

        Raises ``InvalidInput`` on the first call if the engines cannot be split.
        """
        if loads.urls is self._seen:
            return False
        if self._seen is None:
            self._check(loads)
        self._seen = loads.urls
        before = self.heavy, self.fast
        self.heavy = frozenset(self._chosen(loads.urls))
        self.fast = frozenset(loads.urls) - self.heavy
        return before != (self.heavy, self.fast)

    def _chosen(self, urls: Sequence[str]) -> Sequence[str]:
        if self._named is None:
            num = math.floor(self._share * len(urls) + 0.5)
        elif named := [url for url in self._named if url in urls]:
            return named
        else:
            num = len(self._named)
        return urls[: max(1, min(num, len(urls) - 1))]

    def _check(self, loads: EngineLoads) -> None:
        # Engines that do not answer now still count.
        if max(len(loads.urls), len(loads.addresses)) < 2:
            raise InvalidInput(
                "the policy 'probe' needs at least two engines, a heavy one and a fast one (the run has one)",
                hint="add engines to remote_engine_url, or use the policy 'pull'",
                field="scheduler.policy",
            )
        if self._named is None:
            return
        known = {*loads.urls, *loads.addresses}
        unknown = [url for url in self._named if url not in known]
        # A router does not list engines that are down.
        is_routed = any(url not in loads.addresses for url in loads.urls) and bool(loads.addresses)
        if unknown and not (is_routed and len(unknown) < len(self._named)):
            raise InvalidInput(
                f"the run has no engine {unknown[0]!r:.200}",
                hint=f"its engines are {', '.join(sorted(known))[:500]}",
                field=FIELD,
            )
        if known <= set(self._named):
            raise InvalidInput(
                "all engines of the run are named as heavy",
                hint="leave some out: these are the fast engines",
                field=FIELD,
            )
