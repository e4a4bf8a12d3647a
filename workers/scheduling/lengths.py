"""Predicts the length of answers from those seen before."""

import math
from dataclasses import dataclass

from forebay.core.ids import InstanceId

NEWEST_SHARE = 0.2
"""Weight of the newest answer in an instance's mean, about as in an average of the last nine."""
MIN_SLOPE_SCORE = 4.0
"""Standard errors from which the slope of answer length over prompt length is considered significant."""


@dataclass(slots=True)
class _Seen:
    """A moving mean of logarithms."""

    mean: float = 0.0
    num: int = 0

    def add(self, value: float) -> None:
        self.num += 1
        # A plain mean until the newest value's weight falls to ``NEWEST_SHARE``.
        self.mean += max(1.0 / self.num, NEWEST_SHARE) * (value - self.mean)


class LengthPredictor:
    """Predicts the logarithm of an answer's tokens, whose spread is similar for short and long answers.

    For a known instance: the exponentially weighted mean of its answers, from earlier epochs and from siblings in the
    same group. For any other: a line fitted to (log of the prompt's characters, log of tokens) of this run's answers if
    its slope is significant, or else their mean.
    """

    def __init__(self) -> None:
        self._seen: dict[InstanceId, _Seen] = {}
        self._num_seen, self._mean = 0, 0.0
        # For the line: number and means of the answers whose prompt is known.
        self._num = 0
        self._mean_x = self._mean_y = 0.0
        # Sums of squares and products of differences from the means.
        self._xx = self._xy = self._yy = 0.0

    def add(self, instance_id: InstanceId, tokens: int, num_chars: int | None = None) -> None:
        """Record an answer's tokens. ``num_chars``: characters of its prompt, if known."""
        value = math.log1p(max(0, tokens))
        self._seen.setdefault(instance_id, _Seen()).add(value)
        self._num_seen += 1
        self._mean += (value - self._mean) / self._num_seen
        if num_chars is not None:
            self._add_point(math.log1p(num_chars), value)

    def add_bound(self, instance_id: InstanceId, tokens: int) -> bool:
        """Record that an answer was longer than ``tokens``. Returns whether that changes the prediction."""
        seen = self._seen.get(instance_id)
        if seen is None or math.log1p(tokens) <= seen.mean:
            return False
        seen.add(math.log1p(tokens))
        return True

    def of_instance(self, instance_id: InstanceId) -> float | None:
        """Prediction for an instance with known answers; None for others."""
        seen = self._seen.get(instance_id)
        return None if seen is None else seen.mean

    def of_prompt(self, num_chars: int) -> float:
        """Prediction for an instance without known answers."""
        slope = self.slope
        return self._mean_y + slope * (math.log1p(num_chars) - self._mean_x) if slope else self._mean

    @property
    def slope(self) -> float:
        """Slope of the line; 0 if it is not significant."""
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
