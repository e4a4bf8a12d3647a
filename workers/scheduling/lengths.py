"""How long answers will be, as far as those that were seen tell."""

import math
from dataclasses import dataclass

from forebay.core.ids import InstanceId

NEWEST_SHARE = 0.2
"""What the newest answer counts of an instance's mean: about as much as if its last nine were averaged."""
MIN_SLOPE_SCORE = 4.0
"""Standard errors from which it is believed that prompts of other lengths have answers of other lengths."""


@dataclass(slots=True)
class _Seen:
    """A moving mean of logarithms."""

    mean: float = 0.0
    num: int = 0

    def add(self, value: float) -> None:
        self.num += 1
        # A plain mean until there are enough for the newest to count no more than its share.
        self.mean += max(1.0 / self.num, NEWEST_SHARE) * (value - self.mean)


class LengthPredictor:
    """Predicts the logarithm of an answer's tokens, of which the spread is alike for short and long answers.

    By instance: the exponentially weighted mean of the answers that were seen of it, earlier epochs and siblings in the
    same group alike. For an instance of which none was: a straight line through (log of the prompt's characters, log of
    tokens) of all that were seen in this run, where it rises or falls beyond chance; else their mean.
    """

    def __init__(self) -> None:
        self._seen: dict[InstanceId, _Seen] = {}
        self._num_seen, self._mean = 0, 0.0
        # Of those whose prompt is known, for the line: how many, and their means.
        self._num = 0
        self._mean_x = self._mean_y = 0.0
        # Sums of squared and of multiplied differences from the means.
        self._xx = self._xy = self._yy = 0.0

    def add(self, instance_id: InstanceId, tokens: int, num_chars: int | None = None) -> None:
        """An answer of so many tokens was seen; ``num_chars``: of its prompt, where that is known."""
        value = math.log1p(max(0, tokens))
        self._seen.setdefault(instance_id, _Seen()).add(value)
        self._num_seen += 1
        self._mean += (value - self._mean) / self._num_seen
        if num_chars is not None:
            self._add_point(math.log1p(num_chars), value)

    def add_bound(self, instance_id: InstanceId, tokens: int) -> bool:
        """An answer was longer than that, and nobody knows how long; whether that changes the prediction."""
        seen = self._seen.get(instance_id)
        if seen is None or math.log1p(tokens) <= seen.mean:
            return False
        seen.add(math.log1p(tokens))
        return True

    def of_instance(self, instance_id: InstanceId) -> float | None:
        """The prediction for an instance of which answers were seen."""
        seen = self._seen.get(instance_id)
        return None if seen is None else seen.mean

    def of_prompt(self, num_chars: int) -> float:
        """The prediction for any other."""
        slope = self.slope
        return self._mean_y + slope * (math.log1p(num_chars) - self._mean_x) if slope else self._mean

    @property
    def slope(self) -> float:
        """Of the line; 0 where prompts tell nothing."""
        if self._num < 8 or not self._xx or not self._yy:
            return 0.0
        correlation = self._xy / math.sqrt(self._xx * self._yy)
        score = abs(correlation) * math.sqrt((self._num - 2) / max(1e-12, 1.0 - correlation * correlation))
        return self._xy / self._xx if score >= MIN_SLOPE_SCORE else 0.0

    def _add_point(self, x: float, y: float) -> None:
        self._num += 1
        before_x, before_y = x - self._mean_x, y - self._mean_y
        self._mean_x += before_x / self._num
        self._mean_y += before_y / self._num
        self._xx += before_x * (x - self._mean_x)
        self._xy += before_x * (y - self._mean_y)
        self._yy += before_y * (y - self._mean_y)
