"""The lines of one step in the published layout.

For each worker: ``preprocessing`` is until its first call, ``async_generate`` from there to its last rollout,
``barrier_wait`` to the release, ``cache_flush`` while its rollouts were held for weights; then the reply, which all
share: ``data_extraction`` is choosing and hooks, ``batch_construction`` making it (its padding with it),
``final_construction`` sending it. ``broadcast``, ``sorting`` and ``concatenation`` do not happen, and are left out.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from forebay.telemetry.analysis.findings.engine_rates import WORKING, working_s
from forebay.telemetry.analysis.findings.request_causes import union
from forebay.telemetry.analysis.published.published_events import COMPLETE, MONITORING, OPEN, STEP_TOTAL
from forebay.telemetry.analysis.timeline import SURPLUS, Event, ProfileStep, Request, TurnTimes

ABORTED = "aborted_request_with_cancelled_error"
_EVENTS_OF_PHASES = {"engine": "turn_engine_call", "tool": "tool_execution", "reward": "reward_calculation"}
_PARTS_OF_CALLS = ("engine_queue", "prefill", "decode")

_Line = dict[str, Any]


def iso_time(moment_s: float) -> str:
    """With its zone."""
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="microseconds")


def facts_of(step: ProfileStep) -> dict[str, Any]:
    """All of a step but its requests."""
    bare = dataclasses.replace(step, requests=[])
    return {name: value for name, value in dataclasses.asdict(bare).items() if name != "requests"}


class LinesOfStep:
    """The lines of each of its workers, in the order of time."""

    def __init__(self, step: ProfileStep, number: int, workers: dict[str, int]) -> None:
        self._step = step
        self._number = number
        self._by_worker: dict[int, list[tuple[float, _Line]]] = defaultdict(list)
        requests: dict[int, list[Request]] = defaultdict(list)
        for request in step.requests:
            worker = workers.setdefault(request.worker, len(workers))
            requests[worker].append(request)
            self._add_request(worker, request)
        for worker, own in requests.items():
            self._add_worker(worker, own)

    def by_worker(self) -> Iterator[tuple[int, list[_Line]]]:
        """Each worker with its lines."""
        for worker, lines in sorted(self._by_worker.items()):
            yield worker, [line for _, line in sorted(lines, key=lambda item: item[0])]

    def _log(self, worker: int, event: str, end_s: float, duration_s: float | None, extra: _Line) -> None:
        line: _Line = {"timestamp": iso_time(end_s), "event": event}
        if duration_s is not None:
            line["duration_sec"] = max(0.0, duration_s)
        if extra:
            line["extra"] = extra
        self._by_worker[worker].append((end_s, line | {"workid": worker, "step": self._number}))

    def _add_worker(self, worker: int, requests: list[Request]) -> None:
        step = self._step
        release_s = step.satisfied_s if step.satisfied_s is not None else step.end_s
        calls = [_first_call_s(request) for request in requests]
        first_s = min(max(min(calls), step.begin_s), release_s)
        last_s = min(max(first_s, *(request.end_s for request in requests)), release_s)
        self._log(worker, "preprocessing_duration", first_s, first_s - step.begin_s, {})
        self._log(worker, "async_generate_duration", last_s, last_s - first_s, {})
        self._add_over_sampling(worker, requests, first_s, last_s)
        self._log(worker, "barrier_wait_duration", release_s, release_s - last_s, {})
        held = [(event.begin_s, event.end_s) for one in requests for event in one.events if event.name == "hold"]
        if held:
            spans = union(held)
            seconds = sum(end_s - begin_s for begin_s, end_s in spans)
            self._log(worker, "cache_flush_duration", spans[-1][1], seconds, {})
        self._add_reply(worker)
        self._log(worker, STEP_TOTAL, step.end_s, step.duration_s, {})

    def _add_over_sampling(self, worker: int, requests: list[Request], first_s: float, last_s: float) -> None:
        aborted = sum(request.ending in SURPLUS for request in requests)
        if aborted:
            kept = len(requests) - aborted
            counts = {"total_requests": len(requests), "target_completion": kept, "completed_count": kept}
            self._log(worker, MONITORING, last_s, last_s - first_s, counts)

    def _add_reply(self, worker: int) -> None:
        for read in self._step.reads:
            self._log(worker, "data_extraction_duration", read.judged_s, read.judged_s - read.satisfied_s, {})
            self._log(worker, "batch_construction_duration", read.first_byte_s, read.first_byte_s - read.judged_s, {})
            self._log(worker, "final_construction_duration", read.sent_s, read.sent_s - read.first_byte_s, {})

    def _add_request(self, worker: int, request: Request) -> None:
        name = request.request_id
        start = {"request_id": name, "initial_prompt_length": _first_prompt(request)}
        self._log(worker, "request_start", request.begin_s, None, start)
        for turn in request.turns:
            ids = {"request_id": name, "turn": turn.number}
            ending = {"has_tool_calls": turn.has_tools, "finish_reason": turn.finish_reason}
            self._log(worker, "turn_start", turn.begin_s, None, ids | {"current_sequence_length": turn.prompt_tokens})
            self._log(worker, "turn_end", turn.end_s, turn.end_s - turn.begin_s, ids | ending)
        split = _split_turns(request.events)
        for event in request.events:
            self._add_event(worker, request, event, split)
        for number, parts in split.items():
            begin_s, end_s = min(part.begin_s for part in parts), max(part.end_s for part in parts)
            self._log(worker, "turn_engine_call", end_s, end_s - begin_s, _call(request, number))
        facts = {"request_id": name, **_facts(request)}
        event_of_ending = {**dict.fromkeys(SURPLUS, ABORTED), "open": OPEN}.get(request.ending, COMPLETE)
        self._log(worker, event_of_ending, request.end_s, request.duration_s, facts)

    def _add_event(self, worker: int, request: Request, event: Event, split: dict[int | None, list[Event]]) -> None:
        exact = {"begin_s": event.begin_s, "end_s": event.end_s}
        ids: _Line = {"request_id": request.request_id, "turn": event.turn, **exact}
        if event.name == "engine" and event.turn not in split:
            ids |= _call(request, event.turn)
        # A call that its engine told the parts of has one line for the whole: what is left of it keeps its own name.
        is_rest = event.name == "engine" and event.turn in split
        name = event.name if is_rest else _EVENTS_OF_PHASES.get(event.name, event.name)
        if event.is_open:
            ids["is_open"] = True
        self._log(worker, name, event.end_s, event.end_s - event.begin_s, event.info | ids)


def _first_call_s(request: Request) -> float:
    if request.turns:
        return request.turns[0].begin_s
    calls = (event.begin_s for event in request.events if event.name in WORKING)
    return min(calls, default=request.begin_s)


def _first_prompt(request: Request) -> int:
    return request.turns[0].prompt_tokens if request.turns else request.prompt_tokens


def _split_turns(events: list[Event]) -> dict[int | None, list[Event]]:
    """By turn: the parts of its calls, where an engine told them."""
    found: dict[int | None, list[Event]] = defaultdict(list)
    for event in events:
        if event.name in _PARTS_OF_CALLS:
            found[event.turn].append(event)
    return found


def _call(request: Request, number: int | None) -> _Line:
    line: _Line = {"request_id": request.request_id, "turn": number}
    if number is not None and number < len(request.turns):
        line["generated_tokens"] = request.turns[number].sampled_tokens
    return line


def _facts(request: Request) -> _Line:
    engine_s = working_s(request.phases)
    return {
        "turns": len(request.turns),
        "turns_with_tools": sum(turn.has_tools for turn in request.turns),
        "response_length": request.sampled_tokens,
        "actual_response_tokens": request.sampled_tokens,
        "finish_reason": request.turns[-1].finish_reason if request.turns else "",
        "total_engine_time": engine_s,
        "engine_time_pct": 100 * engine_s / request.duration_s if request.duration_s > 0 else 0.0,
        "turn_timings": [_timing(turn) for turn in request.turns],
        "begin_s": request.begin_s,
        "end_s": request.end_s,
        "engine": request.worker,
        "group": request.group,
        "ending": request.ending,
        "outcome": request.outcome,
        "is_used": request.is_used,
        "discarded": request.discarded,
        "is_capped": request.is_capped,
        "reward": request.reward,
        "reward_cpu_s": request.reward_cpu_s,
        "num_attempts": request.num_attempts,
        "num_broken": request.num_broken,
        "broken_s": request.broken_s,
        "broken_tokens": request.broken_tokens,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "phases": request.phases,
    }


def _timing(turn: TurnTimes) -> _Line:
    engine_s = working_s(turn.phases)
    before_s = turn.phases.get("turn_pre_process", 0.0)
    return {
        "turn": turn.number,
        "total_duration": turn.end_s - turn.begin_s,
        "pre_process_duration": before_s,
        "engine_call_duration": engine_s,
        "post_process_duration": max(0.0, turn.end_s - turn.begin_s - before_s - engine_s),
        "tool_parsing_duration": turn.phases.get("turn_tool_parsing", 0.0),
        "has_tool_calls": turn.has_tools,
        "finish_reason": turn.finish_reason,
        "begin_s": turn.begin_s,
        "end_s": turn.end_s,
        "engine": turn.engine,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "generated_tokens": turn.sampled_tokens,
        "phases": turn.phases,
    }
