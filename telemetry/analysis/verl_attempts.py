"""Turns the lines of verl's log about a request into an attempt with a summary and spans, as in a trace."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from forebay.telemetry.analysis.intervals import gaps
from forebay.telemetry.analysis.verl_lines import (
    ABORTS,
    COMPLETE,
    CONTAINERS,
    OUTER,
    RESOLUTION_NS,
    VerlLine,
    number_of,
    phase_of,
)
from forebay.telemetry.attempts import Attempt, Writer
from forebay.telemetry.tracing.exclusive_time import PlainInterval, TurnInterval, rollout_shares
from forebay.telemetry.tracing.records import RolloutSummary, Span, TurnSummary

_Known = tuple[VerlLine, dict[str, Any]]
_NOT_INFO = {"request_id", "turn"}
_TIMINGS = (
    ("pre_process_duration", "turn_pre_process"),
    ("engine_call_duration", "turn_engine_call"),
    ("post_process_duration", "turn_post_process"),
)


def attempt_of(request_id: str, lines: list[VerlLine], window: tuple[int, int], has_ends: bool) -> Attempt:
    """The attempt made of ``lines``. An aborted request is clipped to ``window``.

    ``has_ends``: the step's log contains ends of requests, so a request without one was still open.
    """
    known = [(line, line.info) for line in lines]
    complete, facts = next((each for each in known if each[0].event == COMPLETE), (None, {}))
    abort = next((line for line in lines if line.event in ABORTS), None)
    if complete and not any(line.event.startswith("turn_") for line in lines):
        known += _parts_of_turns(complete, facts)
    aligned = _align([line for line, _ in known], window)
    begin, end = min(line.begin for line in lines), max(line.end for line in lines)
    ending = "finished" if complete or not has_ends else "open"
    if complete is not None:
        begin, end = (begin if complete.d is None else complete.begin), complete.end
    elif abort is not None:
        ending, begin = "aborted", max(begin, aligned[window[0]])
        end = max(begin, min(abort.end, aligned[window[1]]))
    worker = (complete or lines[0]).worker
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
        turns=_turns(known, end, worker),
    )
    _count_tokens(summary, facts)
    events = [(line, info) for line, info in known if line.d and line.event not in CONTAINERS]
    spans = list(_spans(summary, events))
    _add_phases(summary, spans)
    writer = Writer(worker)
    attempt = Attempt.ended(writer, summary, summary.group)
    attempt.spans = [(writer, span) for span in spans]
    return attempt


def own_times(known: list[_Known]) -> Iterator[tuple[VerlLine, dict[str, Any], int, int]]:
    """The parts of each event in which nothing inside it is open. Of several parts, the one that began last counts."""
    parts = [(line.begin, line.end, line, info) for line, info in known if line.event not in OUTER]
    parts.sort(key=lambda part: (part[0], -part[1]))
    for line, info in known:
        if line.event in OUTER:
            yield from ((line, info, *gap) for gap in gaps(line.begin, line.end, parts))
    for number, (begin, end, line, info) in enumerate(parts, 1):
        yield from ((line, info, *gap) for gap in gaps(begin, end, parts[number:]))


def _parts_of_turns(complete: VerlLine, facts: dict[str, Any]) -> Iterator[_Known]:
    """The parts of turns one after another, for a log that has only the ends of requests."""
    turn_begin = complete.begin
    timings = [timing for timing in facts.get("turn_timings") or [] if isinstance(timing, dict)]
    for number, timing in enumerate(timings):
        at = turn_begin
        for key, event in _TIMINGS:
            lasted = round((number_of(timing, key) or 0.0) * 1e9)
            at += lasted
            yield VerlLine(event, at, lasted, complete.worker, complete.request_id, b""), {"turn": number} | timing
        turn_begin = max(at, turn_begin + round((number_of(timing, "total_duration") or 0.0) * 1e9))


def _align(lines: list[VerlLine], window: tuple[int, int]) -> dict[int, int]:
    """Replace each moment by the first of those that differ only by rounding. Returns what replaces each."""
    found: dict[int, int] = {}
    first = -RESOLUTION_NS
    for moment in sorted((*window, *(moment for line in lines for moment in (line.begin, line.end)))):
        if moment - first > RESOLUTION_NS:
            first = moment
        found[moment] = first
    for line in lines:
        line.end, line.d = found[line.end], line.d and found[line.end] - found[line.begin]
    return found


def _turns(known: list[_Known], end: int, worker: str) -> list[TurnSummary]:
    """Turns by their begins. Each lasts until the next begins, the last one until the request ends."""
    begins: dict[int, int] = {}
    facts: dict[int, dict[str, Any]] = {}
    for line, info in known:
        number = number_of(info, "turn")
        if number is not None and line.event.startswith("turn_"):
            turn = int(number)
            begins[turn] = min(begins.get(turn, line.begin), line.begin)
            facts.setdefault(turn, {}).update(info)
    ordered = sorted((begin, turn) for turn, begin in begins.items())
    turns = []
    for (begin, turn), (until, _) in pairwise([*ordered, (end, 0)]):
        info = facts[turn]
        turns.append(
            TurnSummary(
                t=begin,
                d=max(until - begin, 0),
                engine=worker,
                prompt=_count(info, "prompt_tokens", "generation_prompt_length", "current_sequence_length"),
                cached=_count(info, "cached_tokens"),
                sampled=_count(info, "generated_tokens", "sampled_tokens"),
                finish_reason=str(info.get("finish_reason") or "").lower(),
                has_tools=bool(info.get("has_tool_calls") or info.get("parsed_tool_calls")),
            )
        )
    return turns


def _count(info: dict[str, Any], *keys: str) -> int:
    return int(number_of(info, *keys) or 0)


def _spans(summary: RolloutSummary, events: list[_Known]) -> Iterator[Span]:
    """The own time of each event. Time decides the turn: lines of running tools carry the next turn's number."""
    begins = [turn.t for turn in summary.turns]
    for line, info, left, right in own_times(events):
        begin, end = max(left, summary.t), min(right, summary.end)
        if begin < end:
            name, number = phase_of(line.event), bisect_right(begins, begin) - 1
            at = {key: value for key, value in info.items() if key not in _NOT_INFO}
            yield Span(name=name, t=begin, d=end - begin, id="", turn=None if number < 0 else number, at=at)


def _add_phases(summary: RolloutSummary, spans: list[Span]) -> None:
    """Set the exclusive times of the request and its turns."""
    intervals: list[PlainInterval] = [(span.name, span.t, span.t + span.d, "", "") for span in spans]
    marks = []
    for number, turn in enumerate(summary.turns):
        calls = [end for name, begin, end, _, _ in intervals if name == "engine" and turn.t <= begin < turn.t + turn.d]
        marks.append(TurnInterval(number, turn.t, max(calls, default=turn.t), turn.has_tools))
    for of_turn, shares in rollout_shares(intervals, marks, summary.t, summary.end).items():
        phases = {name: round(share) for name, share in shares.items()}
        if of_turn is not None:
            summary.turns[of_turn].phases = phases
        for name, ns in phases.items():
            summary.phases[name] = summary.phases.get(name, 0) + ns


def _count_tokens(summary: RolloutSummary, facts: dict[str, Any]) -> None:
    turns = summary.turns
    sampled = _count(facts, "actual_response_tokens", "response_length")
    summary.sampled = sampled or sum(turn.sampled for turn in turns)
    if len(turns) == 1 and not turns[0].sampled:
        turns[0].sampled = summary.sampled
    summary.prompt = _count(facts, "prompt_tokens") or sum(turn.prompt for turn in turns)
    summary.cached = _count(facts, "cached_tokens") or sum(turn.cached for turn in turns)
    reasons = [str(facts.get("finish_reason") or "").lower(), *(turn.finish_reason for turn in turns)]
    summary.is_capped = bool(facts.get("is_capped", any("length" in reason for reason in reasons)))
