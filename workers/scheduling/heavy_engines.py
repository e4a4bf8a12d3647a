"""Which engines of a run are for its long rollouts, as engines come and go."""

import math
from collections.abc import Sequence

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads

FIELD = "scheduler.heavy"


class HeavyEngines:
    """Some of the engines that answer; the others are the fast ones.

    ``setting`` names them, or tells their share: then they are the first ones of the list, at least one. Where none of
    those that are named answers, as many others stand in for them.
    """

    def __init__(self, setting: Sequence[str] | float) -> None:
        self._named = None if isinstance(setting, float) else tuple(dict.fromkeys(setting))
        self._share = setting if isinstance(setting, float) else 0.0
        self._seen: tuple[str, ...] | None = None
        self.heavy: frozenset[str] = frozenset()
        self.fast: frozenset[str] = frozenset()
        """Empty where a single engine is left, or none that is not heavy."""

    def update(self, loads: EngineLoads) -> bool:
        """Look at the engines that answer now; whether they are others than before.

        Raises ``InvalidInput`` when it is first asked, if they cannot be split.
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
        # One that does not answer just now is one of the run all the same.
        if max(len(loads.urls), len(loads.addresses)) < 2:
            raise InvalidInput(
                "the policy 'probe' needs two engines, a heavy one and a fast one, and the run has one",
                hint="name others in remote_engine_url, or leave the policy at 'pull'",
                field="scheduler.policy",
            )
        if self._named is None:
            return
        known = {*loads.urls, *loads.addresses}
        unknown = [url for url in self._named if url not in known]
        # Behind a router, one that is down is not listed.
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
                hint="leave some out: they are the fast ones",
                field=FIELD,
            )
