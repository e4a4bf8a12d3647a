"""verl's profile logs with faults that were planted, from a seed: what a report must find, and nothing else.

All requests of a step begin together; answers have lengths of one uniform distribution, so that a step without a fault
has neither stragglers nor a worker that is late.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOKENS_PER_S = 10.0
MOMENT_S = 1_750_000_000.0
PUBLISHED_SHARES = {
    "async_generate": 74.05,
    "preprocessing": 18.57,
    "barrier_wait": 6.39,
    "broadcast": 0.52,
    "data_extraction": 0.35,
    "cache_flush": 0.08,
    "padding": 0.04,
    "sorting": 0.0,
    "final_construction": 0.0,
    "batch_construction": 0.0,
    "concatenation": 0.0,
}
_BEFORE = ("broadcast", "preprocessing")


@dataclass
class PlannedTurn:
    """One turn: seconds of each part, in their order."""

    tokens: int
    engine_s: float
    pre_s: float = 0.002
    post_s: float = 0.003
    tool_s: float = 0.0
    finish_reason: str = "stop"


@dataclass
class PlannedRequest:
    """One request; it begins ``begin_s`` after the worker's first."""

    request_id: str
    turns: list[PlannedTurn]
    reward_s: float = 0.01
    begin_s: float = 0.0
    reward: float | None = None
    aborted_at_s: float | None = None
    """Since the worker's first start: whatever it had done until then was thrown away."""

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds if self.aborted_at_s is None else self.aborted_at_s

    @property
    def seconds(self) -> float:
        turns = sum(turn.pre_s + turn.engine_s + turn.post_s + turn.tool_s for turn in self.turns)
        return turns + self.reward_s


@dataclass
class PlannedStep:
    """The requests of each worker, and how long each other phase takes there."""

    workers: dict[str, list[PlannedRequest]]
    """A request without an end takes no part in how long its worker generates."""
    phases: dict[str, float] = field(default_factory=lambda: {"preprocessing": 0.4, "broadcast": 0.05})
    has_total: bool = True
    own_phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """By worker: phases that take another time there. Its requests begin later if one comes before them."""
    without: frozenset[str] = frozenset()
    """Events that are not logged."""

    def phases_of(self, worker: str) -> dict[str, float]:
        return self.phases | self.own_phases.get(worker, {})

    def before_s(self, worker: str) -> float:
        """From the begin of the step to the first request of ``worker``."""
        phases = self.phases_of(worker)
        return sum(phases.get(phase, 0.0) for phase in _BEFORE)

    @property
    def generated_s(self) -> float:
        """From the begin of the step to the end of the last worker."""
        return max(self.before_s(worker) + _last_end(own) for worker, own in self.workers.items())

    @property
    def seconds(self) -> float:
        return self.generated_s + sum(seconds for phase, seconds in self.phases.items() if phase not in _BEFORE)

    def requests(self) -> list[PlannedRequest]:
        return [request for own in self.workers.values() for request in own]


def clean_step(rng: random.Random, number: int, num_workers: int = 4, num_requests: int = 24) -> PlannedStep:
    """Nothing is wrong in it. Half of its requests have one turn, the others two."""
    workers = {
        str(worker): [
            _request(rng, f"{number:03d}-{worker}-{place:03d}", 1 + place % 2, worker) for place in range(num_requests)
        ]
        for worker in range(num_workers)
    }
    scale = rng.uniform(0.8, 1.2)
    return PlannedStep(workers, {"preprocessing": 0.4 * scale, "broadcast": 0.05 * scale})


def _request(rng: random.Random, request_id: str, num_turns: int, worker: int) -> PlannedRequest:
    bounds = [(200, 600)] if num_turns == 1 else [(100, 250), (100, 340)]
    turns = []
    for place, (least, most) in enumerate(bounds):
        tokens = rng.randint(least, most)
        speed = TOKENS_PER_S * rng.uniform(0.98, 1.02)
        tool_s = 0.05 if place + 1 < num_turns else 0.0
        turns.append(PlannedTurn(tokens, tokens / speed, tool_s=tool_s, finish_reason="tool" if tool_s else "stop"))
    return PlannedRequest(request_id, turns, reward=float(rng.random() < 0.5))


def silence(step: PlannedStep, worker: str, begin_s: float, end_s: float) -> None:
    """The engine of ``worker`` gives nothing from ``begin_s`` to ``end_s`` since the first start."""
    for request in step.workers[worker]:
        at_s = request.begin_s
        for turn in request.turns:
            at_s += turn.pre_s
            if begin_s < at_s + turn.engine_s and at_s < end_s:
                turn.engine_s += end_s - max(begin_s, at_s)
            at_s += turn.engine_s + turn.post_s + turn.tool_s


@dataclass
class _File:
    """The lines of one worker's file."""

    worker: str
    step: int
    without: frozenset[str] = frozenset()
    lines: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def log(self, event: str, end_s: float, duration: float | None = None, **extra: Any) -> None:
        if event in self.without:
            return
        line: dict[str, Any] = {"timestamp": iso(end_s), "event": event}
        if duration is not None:
            line["duration_sec"] = duration
        line |= {"extra": extra} if extra else {}
        self.lines.append((end_s, line | {"workid": int(self.worker), "step": self.step}))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for _, line in sorted(self.lines, key=lambda item: item[0]))
        (folder / f"worker_{self.worker}.jsonl").write_text(text)


def iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).replace(tzinfo=None).isoformat(timespec="microseconds")


def write_log(folder: Path, steps: list[PlannedStep], *, first: int = 1, begin_s: float = MOMENT_S) -> Path:
    """``folder``, with all ``steps`` one after the other."""
    for number, step in enumerate(steps, first):
        begin_s = write_step(folder, number, step, begin_s) + 5.0
    return folder


def write_step(folder: Path, number: int, step: PlannedStep, begin_s: float) -> float:
    """When the step ends."""
    after = {phase: seconds for phase, seconds in step.phases.items() if phase not in _BEFORE}
    for worker, own in step.workers.items():
        file = _File(worker, number, step.without)
        at_s = begin_s
        for phase in _BEFORE:
            lasts_s = step.phases_of(worker).get(phase, 0.0)
            at_s += lasts_s
            file.log(f"{phase}_duration", at_s, lasts_s)
        for request in own:
            log_request(file.log, request, at_s)
        generating_s = _last_end(own)
        file.log("async_generate_duration", at_s + generating_s, generating_s)
        at_s += generating_s
        waited_s = begin_s + step.generated_s - at_s
        at_s += waited_s
        if "barrier_wait" not in after:
            file.log("barrier_wait_duration", at_s, max(waited_s, 0.0))
        for phase, seconds in after.items():
            at_s += seconds
            file.log(f"{phase}_duration", at_s, seconds)
        if step.has_total:
            file.log("total_step_duration", begin_s + step.seconds, step.seconds)
        file.write(folder / f"step_{number}")
    return begin_s + step.seconds


def _last_end(own: list[PlannedRequest]) -> float:
    """When a worker's last request ends, since its first begin."""
    return max((request.end_s for request in own), default=0.0)


def log_request(log: Callable[..., None], request: PlannedRequest, window_s: float) -> None:
    """Every line that verl's code writes of a request."""
    at_s = begin_s = window_s + request.begin_s
    request_id = request.request_id
    if request.aborted_at_s is not None:
        log_abort(log, request, window_s)
        return
    log("request_start", at_s, request_id=request_id, initial_prompt_length=120)
    timings = []
    for number, turn in enumerate(request.turns):
        ids = {"request_id": request_id, "turn": number}
        log("turn_start", at_s, **ids, current_sequence_length=120)
        turn_begin_s = at_s
        at_s += turn.pre_s
        log("turn_pre_process", at_s, turn.pre_s, **ids, generation_prompt_length=120)
        at_s += turn.engine_s
        log("turn_engine_call", at_s, turn.engine_s, **ids, generated_tokens=turn.tokens, output_text_length=3)
        at_s += turn.post_s
        has_tools = turn.tool_s > 0
        log("turn_post_process", at_s, turn.post_s, **ids, has_tool_calls=has_tools, finish_reason=turn.finish_reason)
        timings.append(
            {
                "turn": number,
                "total_duration": at_s - turn_begin_s,
                "pre_process_duration": turn.pre_s,
                "engine_call_duration": turn.engine_s,
                "post_process_duration": turn.post_s,
                "tool_parsing_duration": 0.0,
                "has_tool_calls": has_tools,
                "finish_reason": turn.finish_reason,
            }
        )
        log("turn_end", at_s, at_s - turn_begin_s, **ids, has_tool_calls=has_tools, finish_reason=turn.finish_reason)
        if has_tools:
            at_s += turn.tool_s
            # verl's code has counted on by then.
            log("tool_execution", at_s, turn.tool_s, request_id=request_id, turn=number + 1)
            log("tool_calling_state", at_s, turn.tool_s, request_id=request_id, turn=number + 1)
    log("main_loop", at_s, at_s - begin_s, request_id=request_id)
    at_s += request.reward_s
    log("reward_calculation", at_s, request.reward_s, request_id=request_id)
    tokens = sum(turn.tokens for turn in request.turns)
    facts: dict[str, Any] = {} if request.reward is None else {"reward": request.reward}
    log(
        "async_rollout_request_complete",
        at_s,
        at_s - begin_s,
        request_id=request_id,
        finish_reason=request.turns[-1].finish_reason,
        turns=len(request.turns),
        actual_response_tokens=tokens,
        turn_timings=timings,
        **facts,
    )


def log_abort(log: Callable[..., None], request: PlannedRequest, window_s: float) -> None:
    """verl's code tells it twice: when the request is cancelled, and when its place is filled."""
    request_id = request.request_id
    end_s = window_s + (request.aborted_at_s or 0.0)
    turn = request.turns[0]
    log("turn_start", window_s + request.begin_s, request_id=request_id, turn=0)
    ids = {"request_id": request_id, "turn": 0, "generated_tokens": turn.tokens}
    log("turn_engine_call", end_s, end_s - window_s - request.begin_s, **ids)
    log("aborted_request_with_cancelled_error", end_s, end_s - window_s, request_id=request_id)
    log("aborted_request_with_cancelled_error_padding", end_s + 0.0025, 0.0025, request_id=request_id)


def shares_step(rng: random.Random, seconds: float, num_requests: int = 100) -> PlannedStep:
    """A step of the published figures: its shares to the hundredth, and 80 % of the requests in 40 % of the time."""
    generating_s = seconds * PUBLISHED_SHARES["async_generate"] / 100
    early = round(0.8 * num_requests)
    parts = [(place + 1) / early * 0.4 for place in range(early)]
    parts += [0.4 + (place + 1) / (num_requests - early) * 0.6 for place in range(num_requests - early)]
    requests = [
        PlannedRequest(
            f"{seconds:.0f}-{place:03d}",
            [PlannedTurn(1 + round(part * generating_s * 10), part * generating_s - 0.015)],
        )
        for place, part in enumerate(parts)
    ]
    rng.shuffle(requests)
    phases = {name: seconds * share / 100 for name, share in PUBLISHED_SHARES.items() if name != "async_generate"}
    return PlannedStep({"0": requests}, phases)


def steady_step(number: int, num_workers: int = 8, num_requests: int = 512, last_s: float = 32.0) -> PlannedStep:
    """The requests of each worker end one after the other, at one rate, until ``last_s``."""
    ends = [last_s * (place + 1) / num_requests for place in range(num_requests)]
    workers = {
        str(worker): [
            PlannedRequest(f"{number}-{worker}-{place:03d}", [PlannedTurn(round(TOKENS_PER_S * end_s), end_s - 0.015)])
            for place, end_s in enumerate(ends)
        ]
        for worker in range(num_workers)
    }
    return PlannedStep(workers)
