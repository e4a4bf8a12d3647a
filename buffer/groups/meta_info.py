"""The default meta info of a read, kept as samples arrive."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.core.ids import InstanceId


@dataclass
class MetaWindow:
    """Statistics of all samples since the last successful read, except failed ones.

    Mean and squared deviations are updated as in Welford (1962) and merged as in Chan et al. (1979), so that equal
    rewards have no spread at all. A user's own meta hook gets the newest samples.
    """

    keep_samples: int = 0
    """Number of newest samples to remember for a user's hook."""
    ddof: int = 0
    """Subtracted from the number of samples for the deviation: 1 as in slime, 0 for the population's."""
    num_samples: int = 0
    instances: Counter[InstanceId] = field(default_factory=Counter)
    mean: float = 0.0
    deviations: float = 0.0
    """Sum of the squared deviations from the mean."""
    minimum: float = math.inf
    maximum: float = -math.inf
    newest: deque[tuple[SampleGroup, Sample]] = field(default_factory=deque)

    def add(self, group: SampleGroup, sample: Sample) -> None:
        """Count a sample that did not fail; a fork's rollout is counted by its main sample."""
        reward = sample.row.reward
        if reward is None or sample.row.fork:
            return
        self.num_samples += 1
        self.instances[group.instance_id] += 1
        delta = reward - self.mean
        self.mean += delta / self.num_samples
        self.deviations += delta * (reward - self.mean)
        if reward < self.minimum:  # runs for each write: `min` costs several times as much
            self.minimum = reward
        if reward > self.maximum:
            self.maximum = reward
        if self.keep_samples:
            self.newest.append((group, sample))
            if len(self.newest) > self.keep_samples:
                self.newest.popleft()

    def merge_before(self, earlier: "MetaWindow") -> None:
        """Return the samples of an unsuccessful delivery to this window."""
        count = self.num_samples + earlier.num_samples
        if count:
            delta = earlier.mean - self.mean
            self.mean += delta * earlier.num_samples / count
            self.deviations += earlier.deviations + delta * delta * self.num_samples * earlier.num_samples / count
        self.num_samples = count
        self.instances.update(earlier.instances)
        self.minimum = min(self.minimum, earlier.minimum)
        self.maximum = max(self.maximum, earlier.maximum)
        # They are older, so they are dropped first if there are too many.
        self.newest.extendleft(reversed(earlier.newest))
        while len(self.newest) > self.keep_samples:
            self.newest.popleft()

    def meta_info(self) -> dict[str, Any]:
        """The fields that slime's client expects. Rewards are unchanged."""
        count, groups = self.num_samples, len(self.instances)
        if not count:
            numbers = dict.fromkeys(("avg_reward", "reward_std", "reward_min", "reward_max"), 0.0)
            return {"total_samples": 0, "num_groups": 0, "avg_group_size": 0.0, **numbers}
        return {
            "total_samples": count,
            "num_groups": groups,
            "avg_group_size": count / groups,
            "avg_reward": _finite(self.mean),
            "reward_std": _finite(math.sqrt(self.deviations / max(1, count - self.ddof))),
            "reward_min": self.minimum,
            "reward_max": self.maximum,
        }


def _finite(value: float) -> float:
    """Replace overflows by 0: rewards near float64's limit overflow, and JSON cannot represent the result."""
    return value if math.isfinite(value) else 0.0
