"""Calls of one engine over time: how many ran at once, the fill of its cache, and the factors of each call's time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.telemetry.analysis.intervals import union
from forebay.workers.simulator.recorded.rollout_log import LoggedCall

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

MOST_MOMENTS = 2_000
LONG_S = 0.01
"""Shortest time in a queue that counts as waiting for another call."""
LATER_STEPS = 4
"""Steps after a call's admission at which the engine is examined: the call that made room has surely ended then."""


@dataclass(frozen=True)
class TimedCalls:
    """Times of an engine's calls, and their factors: steps, steps times concurrent calls, transport, prompt tokens."""

    seconds: "NDArray[float64]"
    factors: "NDArray[float64]"


@dataclass(frozen=True)
class Residents:
    """Calls that ran at one moment."""

    num: int
    tokens: float
    """Tokens in memory; the shared prompt of siblings counts once."""
    left: float
    """Tokens that they may still sample."""


class EngineTraffic:
    """Statistics of the calls of one engine."""

    def __init__(self, calls: Sequence[LoggedCall]) -> None:
        import numpy

        self.calls = calls
        self.uncached = sum(max(0, call.prompt - call.cached) for call in calls)
        self._entered = numpy.array([call.entered_s for call in calls])
        self._left = numpy.array([call.left_s for call in calls])
        changes = numpy.concatenate([numpy.ones(len(calls)), -numpy.ones(len(calls))])
        self._running = _Curve.of_changes(numpy.concatenate([self._entered, self._left]), changes)
        self.most_at_once = int(self._running.values.max())
        self._prefill = union([(call.entered_s, call.prefilled_s) for call in calls])
        self.prefill_s = sum(end - begin for begin, end in self._prefill)
        """Seconds in which it read prompts, of one or more calls."""

    def rows(self, step_s: float = 1.0, step_s_per_sequence: float = 0.0) -> TimedCalls:
        """Time and factors of each call. If the engine reports its times, the time of a call excludes transport and the
        reading of prompts, and so do the factors.

        Concurrent calls are counted per step of the call, which needs the time of a step.
        """
        import numpy

        begins = numpy.array([call.prefilled_s if call.is_split else call.entered_s for call in self.calls])
        stops = _Curve.of_intervals(self._prefill)
        ends = self._left
        seconds = ends - begins - (stops.integral(ends) - stops.integral(begins))
        running = self._running.values
        rates = 1 / (step_s + step_s_per_sequence * running.clip(1))
        by_step, by_sequence = self._running.of(rates), self._running.of(rates * running)
        counted = (by_step.integral(ends) - by_step.integral(begins)).clip(1e-12)
        beside = (by_sequence.integral(ends) - by_sequence.integral(begins)) / counted
        steps = numpy.array([float(call.sampled) for call in self.calls])
        prompt = numpy.array([0.0 if call.is_split else max(0, call.prompt - call.cached) for call in self.calls])
        way = numpy.array([0.0 if call.is_split else 1.0 for call in self.calls])
        factors = numpy.column_stack([steps, steps * beside.clip(1), way, prompt])
        return TimedCalls(seconds.clip(0), factors)

    def after_waiting(self, shared_share: float, max_tokens: int) -> Iterator[Residents]:
        """Calls that ran whenever a waiting call was admitted, and thus filled the engine."""
        import numpy

        prompts = numpy.array([call.prompt for call in self.calls], dtype=float)
        sampled = numpy.array([call.sampled for call in self.calls], dtype=float)
        limits = numpy.array([call.sampled if call.is_capped else max(max_tokens, call.sampled) for call in self.calls])
        prefilled = numpy.array([call.prefilled_s for call in self.calls])
        lasted = (self._left - prefilled).clip(1e-9)
        shared = self._shared(shared_share)
        own_shared = numpy.array([shared[call.group] for call in self.calls])
        waiting = [call for call in self.calls if call.queue_s > LONG_S]
        for call in waiting[:: max(1, len(waiting) // MOST_MOMENTS)]:
            moment = call.prefilled_s + LATER_STEPS * (call.left_s - call.prefilled_s) / call.sampled
            runs = (self._entered <= moment) & (moment < self._left)
            had = (sampled * (moment - prefilled) / lasted).clip(0, sampled)[runs]
            groups = {self.calls[each].group for each in numpy.flatnonzero(runs).tolist()}
            once = sum(shared[group] for group in groups)
            resident = float((prompts - own_shared)[runs].sum() + had.sum()) + once
            yield Residents(int(runs.sum()), resident, float((limits[runs] - had).sum()))

    def _shared(self, share: float) -> dict[object, float]:
        """Prompt tokens that the calls of each group keep in memory only once."""
        shared: dict[object, float] = {}
        for call in self.calls:
            shared[call.group] = min(share * call.prompt, shared.get(call.group, math.inf))
        return shared


class _Curve:
    """A step function of time, and its integral."""

    def __init__(self, moments: "NDArray[float64]", values: "NDArray[float64]") -> None:
        import numpy

        self._moments, self.values = moments, values
        self._areas = numpy.concatenate([[0.0], (values[:-1] * numpy.diff(moments)).cumsum()])

    @classmethod
    def of_changes(cls, moments: "NDArray[float64]", changes: "NDArray[float64]") -> "_Curve":
        """A curve that changes by the given value at each moment."""
        import numpy

        order = numpy.argsort(moments, kind="stable")
        return cls(moments[order], changes[order].cumsum())

    @classmethod
    def of_intervals(cls, intervals: Sequence[tuple[float, float]]) -> "_Curve":
        """A curve that is 1 within the intervals, and 0 elsewhere."""
        import numpy

        flat = numpy.array(intervals or [(0.0, 0.0)])
        moments = numpy.concatenate([flat[:, 0], flat[:, 1]])
        return cls.of_changes(moments, numpy.repeat([1.0, -1.0], len(flat)))

    def of(self, values: "NDArray[float64]") -> "_Curve":
        """A curve with other values at the same moments."""
        return _Curve(self._moments, values)

    def integral(self, until: "NDArray[float64]") -> "NDArray[float64]":
        """Integral from before the first change to each of these moments."""
        import numpy

        area: NDArray[float64] = numpy.interp(until, self._moments, self._areas)
        return area
