"""Turns the lines of verl's log about a request into an attempt with a summary and spans, as in a trace."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from forebay.telemetry.analysis.intervals import gaps
from forebay.telemetry.analysis.verl_lines import (
    ABORTS,
    COMPLETE,
    CONTAINER,
    RESOLUTION_NS,
    VerlLine,
    depth_of,
    number_of,
    phase_of,
)
from forebay.telemetry.attempts import Attempt, Writer
from forebay.telemetry.tracing.exclusive_time import PlainInterval, TurnInterval, rollout_shares
from forebay.telemetry.tracing.records import RolloutSummary, Span, TurnSummary

_ENGINE = "engine"
_NOT_INFO = {"request_id", "turn"}
_TIMINGS = (
    ("pre_process_duration", "turn_pre_process"),
    ("engine_call_duration", _ENGINE),
    ("post_process_duration", "turn_post_process"),
)


class VerlEvent(NamedTuple):
    """An event from ``begin`` to ``end``, in ns. Its time counts only while no deeper event is open."""

    begin: int
    end: int
    depth: int
    phase: str
    info: dict[str, Any]


def attempt_of(request_id: str, lines: list[VerlLine], window: tuple[int, int], has_ends: bool) -> Attempt:
    """The attempt made of ``lines``. An aborted request is clipped to ``window``.

    ``has_ends``: the step's log contains ends of requests, so a request without one was still open.
    """
    complete = next((line for line in lines if line.event == COMPLETE), None)
    abort = next((line for line in lines if line.event in ABORTS), None)
    begin, end = min(line.begin for line in lines), max(line.end for line in lines)
    ending = "finished" if complete or not has_ends else "open"
    if complete is not None:
        begin, end = (begin if complete.d is None else complete.begin), complete.end
    elif abort is not None:
        ending, begin = "aborted", max(begin, window[0])
        end = max(begin, min(abort.end, window[1]))
    facts = complete.info if complete else {}
    known = [(line, line.info) for line in lines if line is not complete]
    worker = (complete or lines[0]).worker
    timings = [timing for timing in facts.get("turn_timings") or [] if isinstance(timing, dict)]
    turns = _turns(begin, end, known, timings, worker)
    events = [
        VerlEvent(line.begin, line.end, depth_of(line.event), phase_of(line.event), info)
        for line, info in known
        if line.d and depth_of(line.event) > CONTAINER
    ]
    summary = RolloutSummary(
        t=begin,
        d=end - begin,
        id=request_id,
        uid=request_id,
        group=str(facts.get("group") or ""),
        instance=str(facts.get("group") or request_id),
        engine=worker,
        ending=ending,
        reward=number_of(facts, "reward", "reward_score"),
        turns=turns,
    )
    _count_tokens(summary, facts)
    spans = _spans(summary, events or list(_events_of_timings(turns, timings)))
    _add_phases(summary, spans)
    writer = Writer(worker)
    attempt = Attempt.ended(writer, summary, summary.group)
    attempt.spans = [(writer, span) for span in spans]
    return attempt


def own_times(events: Iterable[VerlEvent]) -> Iterator[tuple[VerlEvent, int, int]]:
    """The parts of each event in which no deeper event is open."""
    ordered = sorted(events, key=lambda event: event.begin)
    deeper = {
        depth: [(event.begin, event.end) for event in ordered if event.depth > depth]
        for depth in {event.depth for event in ordered}
    }
    for event in ordered:
        for begin, end in gaps(event.begin, event.end, deeper[event.depth]):
            yield event, begin, end


def _turns(
    begin: int, end: int, known: list[tuple[VerlLine, dict[str, Any]]], timings: list[dict[str, Any]], worker: str
) -> list[TurnSummary]:
    """Turns by number. Each lasts until the next begins, the last one until the request ends."""
    begins: dict[int, int] = {}
    facts: dict[int, dict[str, Any]] = {}
    for line, info in known:
        number = number_of(info, "turn")
        if number is None or not line.event.startswith("turn_"):
            continue
        turn = int(number)
        begins[turn] = min(begins.get(turn, line.begin), line.begin)
        facts.setdefault(turn, {}).update(info)
    at = begin
    for position, timing in enumerate(timings):
        number = number_of(timing, "turn")
        turn = position if number is None else int(number)
        begins.setdefault(turn, at)
        facts[turn] = timing | facts.get(turn, {})
        at = begins[turn] + _length_of(timing)
    ordered = sorted(begins.items(), key=lambda item: (item[1], item[0]))
    ends = [*(first for _, first in ordered[1:]), end][: len(ordered)]
    return [
        _turn(first, max(first, last), facts[turn], worker) for (turn, first), last in zip(ordered, ends, strict=True)
    ]


def _turn(begin: int, end: int, info: dict[str, Any], worker: str) -> TurnSummary:
    return TurnSummary(
        t=begin,
        d=end - begin,
        engine=worker,
        prompt=int(number_of(info, "prompt_tokens", "generation_prompt_length", "current_sequence_length") or 0),
        cached=int(number_of(info, "cached_tokens") or 0),
        sampled=int(number_of(info, "generated_tokens", "sampled_tokens") or 0),
        finish_reason=str(info.get("finish_reason") or "").lower(),
        has_tools=bool(info.get("has_tool_calls") or info.get("parsed_tool_calls")),
    )


def _length_of(timing: dict[str, Any]) -> int:
    if number_of(timing, "total_duration") is not None:
        return _ns_of(timing, "total_duration")
    return sum(_ns_of(timing, key) for key, _ in _TIMINGS)


def _ns_of(timing: dict[str, Any], key: str) -> int:
    return round((number_of(timing, key) or 0.0) * 1e9)


def _events_of_timings(turns: list[TurnSummary], timings: list[dict[str, Any]]) -> Iterator[VerlEvent]:
    """The parts of turns one after another, for a log that has only the ends of requests."""
    for turn, timing in zip(turns, timings, strict=False):
        at = turn.t
        for key, phase in _TIMINGS:
            lasted = _ns_of(timing, key)
            yield VerlEvent(at, at + lasted, 0, phase, {})
            at += lasted


def _spans(summary: RolloutSummary, events: list[VerlEvent]) -> list[Span]:
    """The own time of each event. Time decides the turn: lines of running tools carry the next turn's number."""
    moments = [summary.t, summary.end, *(moment for turn in summary.turns for moment in (turn.t, turn.t + turn.d))]
    moments += [moment for event in events for moment in (event.begin, event.end)]
    aligned = _aligned(moments)
    summary.t, summary.d = aligned[summary.t], aligned[summary.end] - aligned[summary.t]
    for turn in summary.turns:
        turn.t, turn.d = aligned[turn.t], aligned[turn.t + turn.d] - aligned[turn.t]
    begins = [turn.t for turn in summary.turns]
    events = [event._replace(begin=aligned[event.begin], end=aligned[event.end]) for event in events]
    spans = []
    for event, left, right in own_times(events):
        begin, end = max(left, summary.t), min(right, summary.end)
        if begin < end:
            number = bisect_right(begins, begin) - 1
            at = {key: value for key, value in event.info.items() if key not in _NOT_INFO}
            spans.append(
                Span(name=event.phase, t=begin, d=end - begin, id="", turn=None if number < 0 else number, at=at)
            )
    return spans


def _aligned(moments: Iterable[int]) -> dict[int, int]:
    """Map each moment to the first of those that differ only by rounding."""
    found: dict[int, int] = {}
    first = -RESOLUTION_NS
    for moment in sorted(moments):
        if moment - first > RESOLUTION_NS:
            first = moment
        found[moment] = first
    return found


def _add_phases(summary: RolloutSummary, spans: list[Span]) -> None:
    """Set the exclusive times of the request and its turns."""
    intervals: list[PlainInterval] = [(span.name, span.t, span.t + span.d, "", "") for span in spans]
    marks = []
    for number, turn in enumerate(summary.turns):
        calls = [end for name, begin, end, _, _ in intervals if name == _ENGINE and turn.t <= begin < turn.t + turn.d]
        marks.append(TurnInterval(number, turn.t, max(calls, default=turn.t), turn.has_tools))
    for of_turn, shares in rollout_shares(intervals, marks, summary.t, summary.end).items():
        phases = {name: round(share) for name, share in shares.items()}
        if of_turn is not None:
            summary.turns[of_turn].phases = phases
        for name, ns in phases.items():
            summary.phases[name] = summary.phases.get(name, 0) + ns


def _count_tokens(summary: RolloutSummary, facts: dict[str, Any]) -> None:
    turns = summary.turns
    known = number_of(facts, "actual_response_tokens", "response_length")
    summary.sampled = int(known if known is not None else sum(turn.sampled for turn in turns))
    if len(turns) == 1 and not turns[0].sampled:
        turns[0].sampled = summary.sampled
    summary.prompt = int(number_of(facts, "prompt_tokens") or sum(turn.prompt for turn in turns))
    summary.cached = int(number_of(facts, "cached_tokens") or sum(turn.cached for turn in turns))
    reasons = [str(facts.get("finish_reason") or "").lower(), *(turn.finish_reason for turn in turns)]
    summary.is_capped = bool(facts.get("is_capped", any("length" in reason for reason in reasons)))
