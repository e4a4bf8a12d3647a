"""Finds the single cause for which a request took longer than comparable ones: where most of its excess was spent."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.telemetry.analysis.findings.engine_rates import WORKING, EngineRates, working_s
from forebay.telemetry.analysis.intervals import covered, covered_within
from forebay.telemetry.analysis.report import Gap
from forebay.telemetry.analysis.robust import median
from forebay.telemetry.analysis.timeline import ProfileStep, Request, Standstill

CAUSES_OF_PHASES = {
    "queue": "queue",
    "admission": "queue",
    "engine_queue": "queue",
    "engine_wait": "engine_away",
    "retry": "engine_away",
    "hold": "hold",
    "tool": "tool",
    "tool_calling_state": "tool",
    "tool_creation_pending_state": "tool",
    "tool_response_processing": "tool",
    "interacting_state": "tool",
    "interaction_response": "tool",
    "environment": "tool",
    "reward_queue": "reward_queue",
    "reward": "reward",
    "write": "write",
}
"""Any other phase that is not an engine's work counts as the agent's own code."""
_OF_TURNS = ("tool", "agent", "engine_away", "hold", "queue")
_STALL_AMONG_TURNS = 4.0
_STALL_ALONE = 8.0
"""A call is stalled, not just slow, if it took this many times the time its tokens need. The smaller factor applies
if the request's other turns had their usual speed."""
_HALF = 0.5


@dataclass(slots=True)
class Excess:
    """Seconds that a request spent on one thing beyond comparable requests."""

    cause: str
    seconds: float
    turn: int | None = None
    phase: str = ""


class TypicalRequest:
    """The usual times of a step's requests, phase by phase."""

    def __init__(self, step: ProfileStep, gaps: Sequence[Gap]) -> None:
        self._requests = [request for request in step.requests if request.ending == "finished"] or step.requests
        self.rates = EngineRates(self._requests)
        self.duration_s = median([request.duration_s for request in self._requests])
        self.tokens = median([float(request.sampled_tokens) for request in self._requests])
        self._working_s = median([working_s(request.phases) for request in self._requests])
        names = {name for request in self._requests for name in request.phases}
        self._phases = {
            name: median([request.phases.get(name, 0.0) for request in self._requests])
            for name in sorted(names)
            if name not in WORKING
        }
        self._standstills = step.standstills
        self._begin_s = step.begin_s
        begin_s = min((request.begin_s for request in step.requests), default=step.begin_s)
        self._gaps = [(gap.worker, begin_s + gap.begin_s, begin_s + gap.end_s) for gap in gaps]

    def cause_of(self, request: Request) -> Excess:
        """The largest excess, or a blocked event loop if that explains most of it."""
        excess = max([*self._of_phases(request), *self._of_engine(request)], key=lambda excess: excess.seconds)
        excess.seconds -= self._before_step_s(request, excess.phase)
        blocked_s = _overlap_s(request, self._standstills)
        if blocked_s >= _HALF * excess.seconds > 0:
            return Excess("blocked_loop", blocked_s, excess.turn, excess.phase)
        return excess

    def _before_step_s(self, request: Request, phase: str) -> float:
        """The part of a phase before the step began, which cost an earlier step."""
        names = WORKING if phase == "engine" else (phase,)
        events = (event for event in request.events if event.name in names)
        return covered((event.begin_s, min(event.end_s, self._begin_s)) for event in events)

    def _of_phases(self, request: Request) -> Iterable[Excess]:
        by_cause: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, seconds in request.phases.items():
            if name not in WORKING:
                cause = "agent" if _is_outside_turns(request, name) else CAUSES_OF_PHASES.get(name, "agent")
                by_cause[cause].append((seconds - self._phases.get(name, 0.0), name))
        for cause, parts in by_cause.items():
            _, phase = max(parts)
            turn = _worst_turn(request, phase) if cause in _OF_TURNS else None
            yield Excess(cause, sum(seconds for seconds, _ in parts), turn, phase)

    def _of_engine(self, request: Request) -> Iterable[Excess]:
        expected = self.rates.expected_s(request)
        actual = [working_s(turn.phases) for turn in request.turns] or [working_s(request.phases)]
        beyond = [took - needs for took, needs in zip(actual, expected, strict=True)]
        longest = max(range(len(expected)), key=expected.__getitem__)
        worst = max(range(len(beyond)), key=beyond.__getitem__)
        numbered = bool(request.turns)
        # The time expected for many tokens is extrapolated from shorter answers: good enough to choose between the two
        # causes, but not to compute the seconds.
        long_s, slow_s = sum(map(min, expected, actual)) - self._working_s, sum(beyond)
        if long_s > slow_s:
            yield Excess("long_answer", sum(actual) - self._working_s, longest if numbered else None, "engine")
        else:
            cause = "stalled_engine" if self._is_stall(request, worst, actual, expected) else "slow_rate"
            yield Excess(cause, slow_s, worst if numbered else None, "engine")

    def _is_stall(self, request: Request, worst: int, actual: list[float], expected: list[float]) -> bool:
        beyond_s = actual[worst] - expected[worst]
        # Waiting for the trainer's weights and the like are other phases, so this excess was spent in the engine.
        if any(_overlap(request, gap) >= _HALF * beyond_s > 0 for gap in self._gaps if gap[0] == request.worker):
            return True
        others = [
            took / needs for place, (took, needs) in enumerate(zip(actual, expected, strict=True)) if place != worst
        ]
        ratio = actual[worst] / expected[worst] if expected[worst] > 0 else float("inf")
        if others and max(others) < ratio / 2:
            return ratio >= _STALL_AMONG_TURNS
        return ratio >= _STALL_ALONE


def _overlap_s(request: Request, standstills: Sequence[Standstill]) -> float:
    """How long an event loop was blocked while the request was open."""
    return covered_within(((one.begin_s, one.end_s) for one in standstills), request.begin_s, request.end_s)


def _overlap(request: Request, gap: tuple[str, float, float]) -> float:
    _, begin_s, end_s = gap
    working = [event for event in request.events if event.name in WORKING]
    spans = [(event.begin_s, event.end_s) for event in working] or [(request.begin_s, request.end_s)]
    return covered_within(spans, begin_s, end_s)


def _is_outside_turns(request: Request, phase: str) -> bool:
    """Whether an agent's process took the time at its begin or end; within turns, it is the sandbox of a tool."""
    return phase == "environment" and bool(request.turns) and _worst_turn(request, phase) is None


def _worst_turn(request: Request, phase: str) -> int | None:
    found = [(turn.phases.get(phase, 0.0), turn.number) for turn in request.turns]
    seconds, number = max(found, default=(0.0, 0))
    return number if seconds > 0 else None
