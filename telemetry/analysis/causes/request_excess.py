"""What a request spent beyond the usual, by cause: compared with other requests of its step, and with other engines.

The seconds of all causes together are those that the request would have saved if all of it had been usual.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forebay.telemetry.analysis.causes.engine_book import EngineBook, WorkCall, calls_of
from forebay.telemetry.analysis.causes.kinds import ENGINE, PURPOSE_S, PURPOSE_SHARE, kind_of
from forebay.telemetry.analysis.robust import deviation_of, median, percentile
from forebay.telemetry.analysis.timeline import ProfileStep, Request

MIN_DEVIATION = 5.0
_CALL_SPREAD, _MAX_SPREAD = 0.05, 0.5
_WORK_SPREAD, _MAX_WORK_SPREAD = 0.3, 0.75
"""Bounds of the spread that is assumed for logarithms of an engine's calls, and of tools and agents."""
_OF_TAIL = 3.0
"""A tool is slow from this many times the 90th percentile: times of tools have long tails."""
_STALL_AMONG_TURNS, _STALL_ALONE = 4.0, 8.0
"""A call is stalled, not just slow, if it took this many times the time its tokens need. The smaller factor applies
if the request's other turns had their usual speed."""
_MIN_SLOWER = 1.3
_SYSTEMIC = 3.0
"""A call at a slow engine is explained by the engine up to this many times what is usual there."""
_HALF = 0.5
_MIN_REQUESTS, _MIN_SPACINGS, _MOST_SPACINGS = 4, 2, 12
_FEW_APART, _APART = 20.0, 12.0
"""Long answers are apart from the others by this many times what the spacing of the others suggests, with few or with
``_MOST_SPACINGS`` spacings. For spacings of exponential tails, this happens by chance in one of thousands of steps."""


@dataclass(slots=True)
class Excess:
    """Seconds that a request spent on one cause beyond the usual."""

    cause: str
    parts: dict[str, float]
    """By phase; all phases of an engine's work count as ``engine``."""
    turn: int | None = None
    engine: str = ""
    is_of_engine: bool = False
    """Whether all calls at ``engine`` spend it."""
    is_sure: bool = True
    """False for an answer whose length may be one of the usual variation: it counts only in a slow step."""
    is_by_all: bool = False
    """Whether all requests of the step spend it."""

    @property
    def seconds(self) -> float:
        """The seconds of all phases."""
        return sum(self.parts.values())

    @property
    def is_work_of_engine(self) -> bool:
        """Whether an engine spent them on a call."""
        return "engine" in self.parts

    @property
    def phase(self) -> str:
        """The phase with most of them."""
        return max(self.parts, key=lambda name: self.parts[name])


class UsualRequest:
    """The usual times of a step's requests."""

    def __init__(self, step: ProfileStep, earlier: Mapping[str, Sequence[WorkCall]]) -> None:
        self.requests = [each for each in step.requests if each.ending in ("finished", "failed")] or step.requests
        self.book = EngineBook(self.requests, earlier, step.shared)
        self.duration_s = median([request.duration_s for request in self.requests])
        self.tokens = median([float(request.sampled_tokens) for request in self.requests])
        self._needs = {request.request_id: 0.0 for request in self.requests}
        """Seconds of an engine's work that each request needs at the shared rate."""
        for call in self.book.calls:
            self._needs[call.request] += self.book.expected_s(call)
        self._needs_s = median(list(self._needs.values()))
        self._long = _far_apart(self._needs, 0.05 * step.duration_s)
        usual = ((call.work_s - self._systemic_s(call), self.book.expected_s(call)) for call in self.book.calls)
        self._ratios = [spent_s / needed_s for spent_s, needed_s in usual if needed_s > 0]
        self._works: dict[str, list[float]] = {}
        self._ends_s = sorted(request.end_s for request in self.requests)
        self._step_s = step.duration_s

    def excesses_of(self, request: Request, wait_s: float) -> list[Excess]:
        """What ``request`` spent on work beyond the usual, for a step that waited ``wait_s``."""
        found = [*self._of_work(request, wait_s), *self._of_engine(request)]
        return [excess for excess in found if excess.seconds > 0]

    def _of_work(self, request: Request, wait_s: float) -> Iterator[Excess]:
        """Tools and agents: what is far longer than elsewhere, and what takes long for all."""
        by_cause: dict[tuple[str, bool], dict[str, float]] = defaultdict(dict)
        for name, seconds in request.phases.items():
            if name in ENGINE or not kind_of(name).is_work:
                continue
            own, usual = _times_of(request, name), self._usual_times(name)
            usual_s, least = median(usual), _OF_TAIL * percentile(sorted(usual), 90)
            far = [each - usual_s for each in own if each > least and _is_far(each, usual)]
            if not far and max(own, default=0.0) >= PURPOSE_S and seconds >= PURPOSE_SHARE * wait_s:
                is_by_all = usual_s >= _HALF * max(own)
                by_cause[kind_of(name).cause, is_by_all][name] = seconds - (0.0 if is_by_all else usual_s * len(own))
            elif far:
                by_cause[kind_of(name).cause, False][name] = sum(far)
        for (cause, is_by_all), parts in by_cause.items():
            yield Excess(cause, parts, worst_turn(request, parts), is_by_all=is_by_all)

    def _usual_times(self, name: str) -> list[float]:
        if name not in self._works:
            found = [seconds for request in self.requests for seconds in _times_of(request, name)]
            # A phase that few requests have is unusual in itself: the others spend no time on it.
            missing = len(self.requests) - sum(name in request.phases for request in self.requests)
            self._works[name] = found if missing < _HALF * len(self.requests) else [*found, *[0.0] * missing]
        return self._works[name]

    def _of_engine(self, request: Request) -> Iterator[Excess]:
        calls = calls_of(request)
        if not calls:
            return
        single = {call.turn: self.book.beyond_s(call) - self._systemic_s(call) for call in calls}
        numbered = bool(request.turns)
        by_engine: dict[str, float] = defaultdict(float)
        for call in calls:
            by_engine[self.book.slow_place_of(call)] += self._systemic_s(call)
        for engine, seconds in by_engine.items():
            if seconds > 0:
                yield Excess(self.book.slow[engine].cause, {"engine": seconds}, engine=engine, is_of_engine=True)
        worst = max(calls, key=lambda call: single[call.turn])
        slow_s = sum(single.values())
        needed_s = sum(min(self.book.expected_s(call), call.work_s) for call in calls)
        if self.book.knows_tokens and needed_s - self._needs_s > slow_s:
            # What many tokens need is extrapolated from shorter answers: good enough to choose the cause, not to
            # compute the seconds.
            longest = max(calls, key=self.book.expected_s)
            seconds = sum(call.work_s for call in calls) - self._needs_s - sum(by_engine.values())
            turn = longest.turn if numbered else None
            yield Excess("long_answer", {"engine": seconds}, turn, longest.engine, is_sure=self._is_long(request))
        elif self._is_slow(worst):
            cause = "stalled_engine" if self._is_stall(worst, calls) else "slow_rate"
            yield Excess(cause, {"engine": slow_s}, worst.turn if numbered else None, worst.engine)

    def _systemic_s(self, call: WorkCall) -> float:
        """The part of a call's excess that all calls at its engine have."""
        slow = self.book.slow.get(self.book.slow_place_of(call))
        if slow is None:
            return 0.0
        usual_s = max((slow.factor - 1) * self.book.expected_s(call), slow.beyond_s)
        beyond_s = self.book.beyond_s(call)
        return max(0.0, beyond_s if beyond_s <= _SYSTEMIC * usual_s else usual_s)

    def _is_slow(self, call: WorkCall) -> bool:
        needed_s = self.book.expected_s(call)
        ratio = call.work_s / needed_s if needed_s > 0 else 1.0
        return ratio > _MIN_SLOWER and deviation_of(ratio, self._ratios, _CALL_SPREAD, _MAX_SPREAD) > MIN_DEVIATION

    def _is_stall(self, worst: WorkCall, calls: Sequence[WorkCall]) -> bool:
        ratios = {call.turn: call.work_s / max(self.book.expected_s(call), 1e-9) for call in calls}
        others = [ratio for turn, ratio in ratios.items() if turn != worst.turn]
        is_alone = not others or max(others) >= ratios[worst.turn] / 2
        return ratios[worst.turn] >= (_STALL_ALONE if is_alone else _STALL_AMONG_TURNS)

    def _is_long(self, request: Request) -> bool:
        """Whether its length is outside the usual variation, or half of the step was spent on it alone."""
        before = [end_s for end_s in self._ends_s if end_s < request.end_s]
        alone_s = request.end_s - before[-1] if before else 0.0
        longer_s = self._needs.get(request.request_id, 0.0) - self._needs_s
        is_half = len(self.requests) > _MIN_REQUESTS and longer_s >= alone_s >= _HALF * self._step_s
        return is_half or request.request_id in self._long


def _far_apart(values: dict[str, float], least: float) -> set[str]:
    """The names whose values are far above all others: the spacing does not fit the tail of a distribution.

    In an exponential tail, the i-th spacing from the top, times i, has the same mean for all i.
    """
    if len(values) < _MIN_REQUESTS:
        return set()
    names = sorted(values, key=lambda name: -values[name])
    spacings = [place * (values[left] - values[right]) for place, (left, right) in enumerate(pairwise(names), 1)]
    for place in range(max(1, len(names) // 8), 0, -1):
        rest = spacings[place : place + _MOST_SPACINGS]
        if len(rest) < _MIN_SPACINGS:
            continue
        usual = sum(rest) / len(rest)
        apart = _APART if len(rest) == _MOST_SPACINGS else _FEW_APART
        if spacings[place - 1] / place > least and spacings[place - 1] > apart * usual:
            return set(names[:place])
    return set()


def _is_far(seconds: float, usual: Sequence[float]) -> bool:
    return deviation_of(seconds, usual, _WORK_SPREAD, _MAX_WORK_SPREAD) > MIN_DEVIATION


def _times_of(request: Request, phase: str) -> list[float]:
    """The seconds of ``phase`` in each turn, and outside turns."""
    found = [seconds for turn in request.turns if (seconds := turn.phases.get(phase, 0.0)) > 0]
    outside_s = request.phases.get(phase, 0.0) - sum(found)
    return [*found, outside_s] if outside_s > 1e-6 else found


def worst_turn(request: Request, phases: Iterable[str]) -> int | None:
    """The turn with most seconds of ``phases``; None if they were spent outside turns."""
    found = [(sum(turn.phases.get(name, 0.0) for name in phases), turn.number) for turn in request.turns]
    seconds, number = max(found, default=(0.0, 0), key=lambda each: (each[0], -each[1]))
    return number if seconds > 0 else None
