"""How many groups of a mixed batch come from each run. Pure: it only counts."""

import math
import threading
from collections.abc import Mapping

from forebay.core.errors import InvalidInput


class Shares:
    """The groups that each run has delivered over the whole training, and its quota of the next batch. Thread-safe.

    Each run first gets its minimum of a batch, rounded down. The other groups go one by one to the run that is furthest
    behind its share of everything delivered. A minimum up to a run's weight therefore never changes its share.
    """

    def __init__(self, weights: Mapping[str, float], min_shares: Mapping[str, float]) -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise InvalidInput(f"runs must give each run its weight (got {weights!r})", field="runs")
        for run, weight in weights.items():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise InvalidInput(f"a weight must be a number above 0 (got {weight!r})", field=f"runs.{run}")
        for run, share in min_shares.items():
            if run not in weights or not isinstance(share, int | float) or not 0 <= share <= 1:
                why = f"a minimum must be from 0 to 1, of a mixed run (got {share!r})"
                raise InvalidInput(why, field=f"min_shares.{run}")
        if (least := math.fsum(min_shares.values())) > 1:
            raise InvalidInput(f"min_shares must add up to at most 1 (got {least:g})", field="min_shares")
        total = math.fsum(weights.values())
        self._weights = {run: weights[run] / total for run in sorted(weights)}
        self._min_shares = dict(min_shares)
        self._lock = threading.Lock()
        self.delivered = dict.fromkeys(self._weights, 0)

    def count(self, run: str, num_groups: int) -> None:
        """Count groups that a run delivered; a negative number takes them back."""
        with self._lock:
            self.delivered[run] += num_groups

    def quotas(self, num_groups: int) -> dict[str, int]:
        """The number of groups of each run in the next batch, without runs that have none; they are counted."""
        with self._lock:
            total = sum(self.delivered.values()) + num_groups
            # A little is added, because 0.29 of 100 groups are 28.999… in binary numbers.
            quotas = {run: int(num_groups * self._min_shares.get(run, 0.0) + 1e-9) for run in self._weights}
            behind = {run: weight * total - self.delivered[run] for run, weight in self._weights.items()}
            for _ in range(num_groups - sum(quotas.values())):
                # Rounded, so that a tie goes to the first name whatever the last bits are.
                quotas[max(behind, key=lambda run: round(behind[run] - quotas[run], 6))] += 1
            for run, quota in quotas.items():
                self.delivered[run] += quota
        return {run: quota for run, quota in quotas.items() if quota}
