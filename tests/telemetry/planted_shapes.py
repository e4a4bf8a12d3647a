"""Profile logs of verl's without a fault, from a seed, whose shape varies with it.

The shape has workers, requests, turns, lengths, speeds, tools, rewards and phases. ``planted_kinds.py`` plants faults.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.telemetry.planted_log import PlannedRequest, PlannedStep, PlannedTurn, write_log

_MAX_CALLS = (400, 400, 800, 1600)
"""Calls in a log, of which most must be quick to read."""
_OPTIONAL = ("request_start", "turn_start", "turn_end", "main_loop", "tool_execution")
"""Events that a log may lack; where ``tool_execution`` is missing, ``tool_calling_state`` says the same."""
_MOST_ALONE = 0.2
_MOST_LATE = 0.35
"""The share of a step that a request, or a worker, of a clean log may end after all others."""


@dataclass
class Shape:
    """What the requests of one log have in common."""

    rng: random.Random
    num_workers: int
    per_worker: int
    num_steps: int
    turns: tuple[int, int]
    tokens: Callable[[], int]
    cap: int
    speed: float
    """Tokens per second."""
    call_s: float
    """What a call takes besides its tokens."""
    typical_s: float
    """What a call with the usual number of tokens takes."""
    noise: float
    tool_s: tuple[float, float]
    reward_s: tuple[float, float]
    has_rewards: bool
    has_total: bool
    without: frozenset[str]
    speeds: list[float] = field(default_factory=list)
    """By worker: engines differ by a per cent or two."""

    def steps(self) -> list[PlannedStep]:
        return [self.step() for _ in range(self.num_steps)]

    def step(self) -> PlannedStep:
        workers = {
            str(worker): [self.request(worker) for _ in range(self.per_worker)] for worker in range(self.num_workers)
        }
        return PlannedStep(workers, {}, has_total=self.has_total, without=self.without)

    def request(self, worker: int) -> PlannedRequest:
        rng = self.rng
        turns = []
        num_turns = rng.randint(*self.turns)
        for number in range(num_turns):
            tokens = min(self.tokens(), self.cap)
            turn = PlannedTurn(
                tokens, self.engine_s(worker, tokens), rng.uniform(0.001, 0.004), rng.uniform(0.001, 0.006)
            )
            is_last = number + 1 == num_turns
            turn.tool_s = 0.0 if is_last else rng.uniform(*self.tool_s)
            turn.finish_reason = "length" if tokens == self.cap else "stop" if is_last else "tool_calls"
            turns.append(turn)
        reward = float(rng.random() < 0.6) if self.has_rewards else None
        request_id = f"{rng.getrandbits(64):016x}"
        return PlannedRequest(request_id, turns, rng.uniform(*self.reward_s), rng.uniform(0.0, 0.05), reward)

    def engine_s(self, worker: int, tokens: int) -> float:
        noise = min(max(self.rng.gauss(1.0, self.noise), 1 - 2.5 * self.noise), 1 + 2.5 * self.noise)
        return (self.call_s + tokens / (self.speed * self.speeds[worker])) * noise


def draw_shape(rng: random.Random) -> Shape:
    num_workers = rng.choice([2, 2, 3, 4, 4, 6, 8, 8, 12, 16])
    wanted = 2 ** rng.uniform(3, 8)
    least = 2 if num_workers > 2 else 4
    per_worker = max(least, round(wanted / num_workers))
    num_steps = rng.randint(5, 12)
    most_turns = rng.choice([1, 2, 3, 4, 6, 8, 10])
    most_calls = rng.choice(_MAX_CALLS)
    while num_workers * per_worker * num_steps * (1 + most_turns) / 2 > most_calls:
        if most_turns > 2:
            most_turns -= 1
        elif num_steps > 5:
            num_steps -= 1
        elif per_worker > least:
            per_worker -= 1
        else:
            break
    typical = rng.uniform(100, 500)
    speed = rng.uniform(20, 100)
    if rng.random() < 0.5:
        low, high = typical * rng.uniform(0.3, 0.8), typical * rng.uniform(1.2, 1.8)
        tokens, cap = lambda: round(rng.uniform(low, high)), round(high)
    else:
        sigma = rng.uniform(0.2, 0.5)
        tokens, cap = lambda: round(rng.lognormvariate(0.0, sigma) * typical), round(typical * rng.uniform(2.0, 2.6))
    tool_s = min(rng.uniform(0.2, 3.0), 0.4 * typical / speed)
    reward_s = rng.uniform(0.01, 0.05)
    return Shape(
        rng,
        num_workers,
        per_worker,
        num_steps,
        (rng.randint(1, min(most_turns, 3)), most_turns),
        tokens,
        cap,
        speed,
        rng.uniform(0.03, 0.2),
        typical / speed,
        rng.uniform(0.01, 0.06),
        (0.5 * tool_s, tool_s),
        (reward_s, 2 * reward_s),
        rng.random() < 0.7,
        rng.random() < 0.8,
        frozenset(event for event in _OPTIONAL if rng.random() < 0.3),
        [rng.uniform(0.985, 1.015) for _ in range(num_workers)],
    )


def clean_steps(shape: Shape) -> list[PlannedStep]:
    """Steps without a fault: in none of them does a request end long after all others."""
    steps = shape.steps()
    while not all(_ends_together(step) for step in steps):
        steps = [step if _ends_together(step) else shape.step() for step in steps]
    rng = shape.rng
    usual_s = statistics.median(step.generated_s for step in steps)
    parts = {"broadcast": (0.002, 0.01), "preprocessing": (0.005, 0.035), "cache_flush": (0.002, 0.01)}
    parts |= {"data_extraction": (0.001, 0.006), "padding": (0.0002, 0.001), "batch_construction": (0.0001, 0.002)}
    parts |= {"sorting": (1e-5, 1e-4), "concatenation": (1e-5, 2e-4), "final_construction": (1e-5, 1e-3)}
    means = {name: usual_s * rng.uniform(*bounds) for name, bounds in parts.items()}
    for step in steps:
        step.phases = {name: mean_s * rng.uniform(0.85, 1.15) for name, mean_s in means.items()}
    return steps


def _ends_together(step: PlannedStep) -> bool:
    ends = sorted(request.end_s for request in step.requests())
    of_workers = sorted(max(request.end_s for request in own) for own in step.workers.values())
    alone_s, late_s = ends[-1] - ends[-2], of_workers[-1] - of_workers[-2]
    return alone_s <= _MOST_ALONE * ends[-1] and late_s <= _MOST_LATE * ends[-1]


def write_clean(seed: int, folder: Path) -> Path:
    """Write a log without any fault to ``folder``."""
    return write_log(folder, clean_steps(draw_shape(random.Random(f"clean-{seed}"))))
