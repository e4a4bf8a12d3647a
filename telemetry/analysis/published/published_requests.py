"""A request, from the lines that a log in the published layout has of it."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from forebay.telemetry.analysis.published.deepest_time import OpenPart, TimedEvent, seconds_by_phase, segments
from forebay.telemetry.analysis.published.published_events import (
    ABORTS,
    COMPLETE,
    MOMENTS,
    depth_of,
    is_abort,
    is_leaf,
    phase_of,
)
from forebay.telemetry.analysis.published.published_lines import PublishedLine, number_of
from forebay.telemetry.analysis.timeline import Event, Request, TurnTimes

_BETWEEN = "agent"
_AFTER_TOOLS = "tool"
_RESOLUTION_S = 2e-6
"""Times are written in microseconds."""
_LONG_ENOUGH_S = 0.001
"""What nobody measured is an event of its own from here on; below, it is the writing of the log."""


def request_of(request_id: str, lines: list[PublishedLine], window: tuple[float, float], has_ends: bool) -> Request:
    """The request whose ``lines`` these are; ``window`` is what a request that was thrown away is clipped to.

    ``has_ends`` says whether the step's log tells the ends of requests: then one without an end was still open.
    """
    complete = next((line for line in lines if line.event == COMPLETE), None)
    abort = next((line for line in lines if line.event in ABORTS), None)
    facts = complete.info if complete else {}
    begin_s, end_s = _bounds(lines, complete)
    ending = "finished" if complete or not has_ends else "open"
    if abort and not complete:
        ending = "aborted"
        begin_s = max(begin_s, window[0])
        end_s = max(begin_s, min(abort.end_s, window[1]))
    request = Request(
        request_id,
        (complete or lines[0]).worker,
        begin_s,
        end_s,
        group=str(facts.get("group") or ""),
        ending=ending,
        is_used=ending == "finished",
        reward=number_of(facts, "reward", "reward_score"),
    )
    _fill_in(request, lines, facts)
    return request


def _bounds(lines: list[PublishedLine], complete: PublishedLine | None) -> tuple[float, float]:
    begin_s = min(line.begin_s for line in lines)
    if complete is None:
        return begin_s, max(line.end_s for line in lines)
    return (complete.begin_s if complete.duration_s is not None else begin_s), complete.end_s


def _fill_in(request: Request, lines: list[PublishedLine], facts: dict[str, Any]) -> None:
    timed_events = [
        TimedEvent(line.begin_s, line.end_s, depth_of(line.event), phase_of(line.event))
        for line in lines
        if line.duration_s and is_leaf(line.event) and not is_abort(line.event)
    ]
    timings = [timing for timing in facts.get("turn_timings") or [] if isinstance(timing, dict)]
    request.turns = _turns(request, lines, timings)
    if not timed_events:
        timed_events = list(_from_timings(request.turns, timings))
    parts = list(_named(segments(timed_events, request.begin_s, request.end_s), request.turns))
    for turn in request.turns:
        turn.phases = seconds_by_phase([part for part in parts if turn.begin_s <= part.begin_s < turn.end_s])
    request.phases = seconds_by_phase(parts)
    request.events = _events(request, lines, parts)
    _count_tokens(request, facts)


def _turns(request: Request, lines: list[PublishedLine], timings: list[dict[str, Any]]) -> list[TurnTimes]:
    """By their numbers, from 0; each lasts until the next begins, the last until the request ends."""
    begins: dict[int, float] = {}
    facts: dict[int, dict[str, Any]] = {}
    for line in lines:
        number = number_of(line.info, "turn")
        if number is None or not line.event.startswith("turn_"):
            continue
        turn = int(number)
        begins[turn] = min(begins.get(turn, line.begin_s), line.begin_s)
        facts.setdefault(turn, {}).update(line.info)
    at_s = request.begin_s
    for position, timing in enumerate(timings):
        number = number_of(timing, "turn")
        turn = position if number is None else int(number)
        begins.setdefault(turn, at_s)
        facts[turn] = timing | facts.get(turn, {})
        at_s = begins[turn] + _length_of(timing)
    ordered = sorted(begins.items(), key=lambda item: (item[1], item[0]))
    ends = [*(begin_s for _, begin_s in ordered[1:]), request.end_s][: len(ordered)]
    return [
        _turn(number, begin_s, max(begin_s, end_s), facts[turn], request.worker)
        for number, ((turn, begin_s), end_s) in enumerate(zip(ordered, ends, strict=True))
    ]


def _turn(number: int, begin_s: float, end_s: float, info: dict[str, Any], worker: str) -> TurnTimes:
    return TurnTimes(
        number,
        begin_s,
        end_s,
        engine=worker,
        prompt_tokens=int(number_of(info, "prompt_tokens", "generation_prompt_length", "current_sequence_length") or 0),
        cached_tokens=int(number_of(info, "cached_tokens") or 0),
        sampled_tokens=int(number_of(info, "generated_tokens", "sampled_tokens") or 0),
        finish_reason=str(info.get("finish_reason") or "").lower(),
        has_tools=bool(info.get("has_tool_calls") or info.get("parsed_tool_calls")),
    )


def _length_of(timing: dict[str, Any]) -> float:
    total = number_of(timing, "total_duration")
    if total is not None:
        return total
    return sum(number_of(timing, name) or 0.0 for name, _ in _PARTS)


_PARTS = (
    ("pre_process_duration", "turn_pre_process"),
    ("engine_call_duration", "engine"),
    ("post_process_duration", "turn_post_process"),
)


def _from_timings(turns: list[TurnTimes], timings: list[dict[str, Any]]) -> Iterator[TimedEvent]:
    """The parts of turns one after the other, for a log that tells only the ends of requests."""
    for turn, timing in zip(turns, timings, strict=False):
        at_s = turn.begin_s
        for key, phase in _PARTS:
            seconds = number_of(timing, key) or 0.0
            yield TimedEvent(at_s, at_s + seconds, 0, phase)
            at_s += seconds


def _named(parts: Iterator[OpenPart], turns: list[TurnTimes]) -> Iterator[OpenPart]:
    """What nobody measured is ``tool`` after a turn with tool calls, else ``agent``. Cut where turns begin."""
    begins = [turn.begin_s for turn in turns]
    for part in parts:
        cuts = [part.begin_s, *begins[bisect_right(begins, part.begin_s) : bisect_right(begins, part.end_s)]]
        for left, right in zip(cuts, [*cuts[1:], part.end_s], strict=True):
            if right - left > (0.0 if part.phases else _RESOLUTION_S):
                before = bisect_right(begins, left) - 1
                unmeasured = _AFTER_TOOLS if before >= 0 and turns[before].has_tools else _BETWEEN
                yield OpenPart(left, right, part.phases or (unmeasured,))


_NOT_INFO = {"request_id", "turn"}


def _events(request: Request, lines: list[PublishedLine], parts: list[OpenPart]) -> list[Event]:
    """The leaves of a request. A line's time decides its turn: while tools run, its number is the next turn's."""
    leaves = [line for line in lines if line.duration_s is not None and _is_event(line, lines)]
    begins = [turn.begin_s for turn in request.turns]

    def turn_at(moment_s: float) -> int | None:
        return bisect_right(begins, moment_s) - 1 if begins and moment_s >= begins[0] else None

    events = [
        Event(
            phase_of(line.event),
            max(line.begin_s, request.begin_s),
            max(request.begin_s, min(line.end_s, request.end_s)),
            turn_at(line.begin_s),
            info={key: value for key, value in line.info.items() if key not in _NOT_INFO},
        )
        for line in leaves
    ]
    if events:
        events += _gaps(events, request, turn_at, parts)
    return _without_slits(sorted(events, key=lambda event: (event.begin_s, event.end_s)), request)


def _without_slits(events: list[Event], request: Request) -> list[Event]:
    """One begins where the one before it ended, if no more than the rounding of times lies between them."""
    at_s = request.begin_s
    for event in events:
        if abs(event.begin_s - at_s) <= _RESOLUTION_S <= event.end_s - at_s:
            event.begin_s = at_s
        at_s = max(at_s, event.end_s)
    if events and abs(request.end_s - events[-1].end_s) <= _RESOLUTION_S:
        events[-1].end_s = request.end_s
    return events


def _is_event(line: PublishedLine, lines: list[PublishedLine]) -> bool:
    if line.event in MOMENTS or is_abort(line.event) or not is_leaf(line.event):
        return False
    depth = depth_of(line.event)
    if depth > depth_of("turn_engine_call"):
        return True
    return not any(
        depth_of(other.event) > depth and other.begin_s >= line.begin_s and other.end_s <= line.end_s
        for other in lines
        if other.duration_s
    )


def _gaps(
    events: list[Event], request: Request, turn_at: Callable[[float], int | None], parts: list[OpenPart]
) -> Iterator[Event]:
    """Events for what no event covers."""
    at_s = request.begin_s
    phases = {part.begin_s: part.phases[0] for part in parts}
    for event in sorted(events, key=lambda event: event.begin_s):
        if event.begin_s - at_s >= _LONG_ENOUGH_S:
            yield Event(phases.get(at_s, _BETWEEN), at_s, event.begin_s, turn_at(at_s))
        at_s = max(at_s, event.end_s)
    if request.end_s - at_s >= _LONG_ENOUGH_S:
        yield Event(phases.get(at_s, _BETWEEN), at_s, request.end_s, turn_at(at_s))


def _count_tokens(request: Request, facts: dict[str, Any]) -> None:
    known = number_of(facts, "actual_response_tokens", "response_length")
    request.sampled_tokens = int(known if known is not None else sum(turn.sampled_tokens for turn in request.turns))
    if len(request.turns) == 1 and not request.turns[0].sampled_tokens:
        request.turns[0].sampled_tokens = request.sampled_tokens
    request.prompt_tokens = int(number_of(facts, "prompt_tokens") or sum(turn.prompt_tokens for turn in request.turns))
    request.cached_tokens = int(number_of(facts, "cached_tokens") or sum(turn.cached_tokens for turn in request.turns))
    reasons = [str(facts.get("finish_reason") or "").lower(), *(turn.finish_reason for turn in request.turns)]
    request.is_capped = bool(facts.get("is_capped", any("length" in reason for reason in reasons)))
