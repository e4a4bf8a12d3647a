"""The findings of a step: what each of its waits waited for, and what costs the step as a whole.

The request that a wait waited for last is always explained. Each of its causes counts with the seconds that were spent
on the path of the wait; causes that cost too little are left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.telemetry.analysis.causes import step_findings
from forebay.telemetry.analysis.causes.engine_book import SHARED, EngineBook, WorkCall
from forebay.telemetry.analysis.causes.kinds import ENGINE, KINDS, MIN_S, MIN_SHARE, kind_of
from forebay.telemetry.analysis.causes.request_excess import Excess, UsualRequest, worst_turn
from forebay.telemetry.analysis.causes.wording import COST, happened, of_step, slow_engine_text, subject
from forebay.telemetry.analysis.critical_path import CriticalPath, PathOfWait
from forebay.telemetry.analysis.intervals import covered_within
from forebay.telemetry.analysis.report import EventPath, Finding, OutlierRequest, StepSummary
from forebay.telemetry.analysis.robust import longest
from forebay.telemetry.analysis.timeline import Event, ProfileStep, Request, TurnTimes
from forebay.telemetry.numbers import seconds_text

_MAX_EVENTS = 300
_OF_TURNS = ("engine_away", "engine_queue", "hold")
"""Causes of waiting that have a turn."""
_MOST_WAITS = 200
"""Waits of a step that are explained, the longest: a trainer may read one group at a time."""


@dataclass(slots=True)
class ExplainedStep:
    """The findings of one step, largest first."""

    book: EngineBook
    findings: list[Finding] = field(default_factory=list)
    unsure: list[Finding] = field(default_factory=list)
    """What explains the step if it was slow; otherwise it is left out."""
    requests: list[OutlierRequest] = field(default_factory=list)
    """The requests that it waited for last."""


def explain(
    step: ProfileStep,
    summary: StepSummary,
    path: CriticalPath,
    earlier: Mapping[str, Sequence[WorkCall]],
) -> ExplainedStep:
    """Name what ``step`` waited for along ``path``. ``earlier``: calls of earlier steps by engine."""
    usual = UsualRequest(step, earlier)
    explained = ExplainedStep(usual.book)
    whole = list(step_findings.costs_of(step, summary, path))
    barrier = step_findings.late_worker(step, summary, path, usual.book.slow)
    if barrier is not None and not _is_worth(barrier):
        barrier = None
    contributions: list[_Contribution] = []
    waits = [wait for wait in path.waits if wait.request is not None]
    for wait in longest(waits, _MOST_WAITS, lambda wait: wait.end_s - wait.begin_s):
        found = list(_contributions(step, wait, usual, barrier))
        contributions += found
        explained.requests.append(_described(summary.name, wait, usual, found))
    sure = [each for each in contributions if each.excess.is_sure]
    explained.unsure = list(_together(summary, [each for each in contributions if not each.excess.is_sure]))
    found_here = [*whole, *([barrier] if barrier else []), *_together(summary, sure)]
    explained.findings = sorted(filter(_is_worth, found_here), key=lambda finding: -finding.seconds)
    return explained


def _is_worth(finding: Finding) -> bool:
    return finding.share >= MIN_SHARE and finding.seconds >= MIN_S


@dataclass(slots=True)
class _Contribution:
    """Seconds that one cause cost a wait."""

    excess: Excess
    seconds: float
    path: EventPath
    text: str


def _contributions(
    step: ProfileStep, wait: PathOfWait, usual: UsualRequest, barrier: Finding | None
) -> Iterator[_Contribution]:
    request = wait.request
    assert request is not None
    spent, lost_s = _seconds_on_path(step, wait)
    if lost_s:
        yield _of_failures(request, lost_s + spent.pop("retry", 0.0))
    excesses = usual.excesses_of(request, wait.end_s - wait.begin_s)
    # A wait may have begun when part of the engines' work was done.
    engine_s = sum(spent.get(name, 0.0) for name in ENGINE)
    part = min(1.0, engine_s / (sum(each.seconds for each in excesses if each.is_work_of_engine) or 1.0))
    for excess in [*_waiting(request, spent), *excesses]:
        if barrier is not None and request.worker == barrier.path.worker and excess.is_work_of_engine:
            continue
        on_path_s = sum(spent.get(name, 0.0) for name in excess.parts)
        seconds = part * excess.seconds if excess.is_work_of_engine else min(excess.seconds, on_path_s)
        if seconds > 0:
            yield _contribution(request, excess, seconds, usual)


def _waiting(request: Request, spent: Mapping[str, float]) -> Iterator[Excess]:
    """Phases in which nothing is done: all seconds on the path count, those before the request began, too."""
    by_cause: dict[str, dict[str, float]] = defaultdict(dict)
    for name, seconds in spent.items():
        if name not in ENGINE and name in KINDS and not KINDS[name].is_work:
            by_cause[KINDS[name].cause][name] = seconds
    for cause, parts in by_cause.items():
        turn = worst_turn(request, parts) if cause in _OF_TURNS else None
        yield Excess(cause, parts, turn)


def _seconds_on_path(step: ProfileStep, wait: PathOfWait) -> tuple[dict[str, float], float]:
    """Seconds of the path by phase, and those of failed attempts; without those of a blocked event loop."""
    stalls = [(each.begin_s, each.end_s) for each in step.standstills]
    failed = [(each.begin_s, each.end_s) for each in wait.request.failed] if wait.request else []
    spent: dict[str, float] = defaultdict(float)
    lost_s = 0.0
    for part in wait.parts:
        if part.path.event == "queue" and not part.path.request:
            continue  # the request had not begun: it did not wait for a slot, but for others to be started
        end_s = part.begin_s + part.seconds
        blocked_s = covered_within(stalls, part.begin_s, end_s)
        failed_s = covered_within(failed, part.begin_s, end_s) if part.path.request else 0.0
        lost_s += min(failed_s, part.seconds - blocked_s)
        spent[part.path.event] += max(0.0, part.seconds - blocked_s - failed_s)
    return spent, lost_s


def _of_failures(request: Request, seconds: float) -> _Contribution:
    kinds: dict[tuple[str, str], float] = defaultdict(float)
    for attempt in request.failed:
        kinds[attempt.kind, attempt.tool] += attempt.end_s - attempt.begin_s
    kind, tool = max(kinds, key=lambda name: kinds[name])
    path = EventPath(worker=request.worker, group=request.group, request=request.request_id, event=tool or kind)
    excess = Excess("failures", {"retry": seconds})
    why = f"the tool {tool} raised" if tool else kind
    text = f"{subject(path)} lost {COST} to {len(request.failed)} failed attempts ({why})"
    return _Contribution(excess, seconds, path, text)


def _contribution(request: Request, excess: Excess, seconds: float, usual: UsualRequest) -> _Contribution:
    if excess.is_of_engine:
        slow = usual.book.slow[excess.engine]
        engine = "" if excess.engine == SHARED else excess.engine
        path = EventPath(worker=engine, event=slow.part or "engine")
        return _Contribution(excess, seconds, path, slow_engine_text(engine, slow))
    turn = None if excess.turn is None else request.turns[excess.turn]
    path = EventPath(
        worker=excess.engine or (turn.engine if turn else "") or request.worker,
        group=request.group,
        request=request.request_id,
        turn=excess.turn,
        event=_tool_of(request, excess.phase, turn) if excess.cause == "tool" else excess.phase,
    )
    what = happened(excess.cause, path.event, request.sampled_tokens, usual.tokens, is_by_all=excess.is_by_all)
    return _Contribution(excess, seconds, path, f"{subject(path, len(request.turns))} {what}")


def _tool_of(request: Request, phase: str, turn: TurnTimes | None) -> str:
    """The name of the tool, if known, else the phase."""
    own = [event for event in request.events if event.name == phase and event.info.get("tool")]
    if own:
        return str(max(own, key=_seconds_of).info["tool"])
    named = turn.tools if turn else ()
    return named[0] if len(named) == 1 else phase


def _together(summary: StepSummary, contributions: Iterable[_Contribution]) -> Iterator[Finding]:
    """One finding for each cause of a step, and each engine or tool."""
    places: dict[tuple[str, str], list[_Contribution]] = defaultdict(list)
    for each in contributions:
        is_engine = each.excess.is_work_of_engine and each.excess.cause != "long_answer"
        places[each.excess.cause, each.path.worker if is_engine else each.path.event].append(each)
    for (cause, _), own in places.items():
        worst = max(own, key=lambda each: each.seconds)
        seconds = sum(each.seconds for each in own)
        if seconds < kind_of(worst.excess.phase).min_share * summary.seconds:
            continue
        text = worst.text.replace(COST, seconds_text(seconds))
        yield of_step(summary, cause, seconds, text, worst.path)


def _described(step: str, wait: PathOfWait, usual: UsualRequest, found: Sequence[_Contribution]) -> OutlierRequest:
    request = wait.request
    assert request is not None
    place = EventPath(group=request.group, worker=request.worker, request=request.request_id)
    nothing = _Contribution(Excess("", {"": 0.0}), 0.0, place, f"{subject(place)} ended last")
    worst = max(found, key=lambda each: each.seconds, default=nothing)
    return OutlierRequest(
        step=step,
        request=request.request_id,
        worker=worst.path.worker,
        group=request.group,
        begin_s=request.begin_s,
        seconds=request.duration_s,
        beyond_s=request.duration_s - usual.duration_s,
        cause=worst.excess.cause,
        cause_s=worst.seconds,
        cause_event=worst.path.event,
        sentence=worst.text.replace(COST, seconds_text(worst.seconds)),
        turn=worst.excess.turn,
        phases=request.phases,
        turns=[_turn(turn, request) for turn in request.turns],
        events=[_event(event, request) for event in longest(request.events, _MAX_EVENTS, _seconds_of)],
    )


def _seconds_of(event: Event) -> float:
    return event.end_s - event.begin_s


def _turn(turn: TurnTimes, request: Request) -> dict[str, Any]:
    times = {"begin_s": turn.begin_s - request.begin_s, "seconds": turn.end_s - turn.begin_s}
    facts = {"engine": turn.engine, "tokens": turn.sampled_tokens, "finish_reason": turn.finish_reason}
    return {"number": turn.number, **times, **facts, "phases": turn.phases}


def _event(event: Event, request: Request) -> dict[str, Any]:
    begin_s, more = event.begin_s - request.begin_s, {"is_open": True} if event.is_open else {}
    more |= {"load": event.info["load"]} if "load" in event.info else {}
    return {"name": event.name, "begin_s": begin_s, "seconds": _seconds_of(event), "turn": event.turn, **more}
