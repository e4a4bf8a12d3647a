"""Profile logs of verl's with one fault of each of 17 kinds, from a seed.

Every fault costs at least a tenth of the time of the steps that have it; a seed whose fault would cost less is drawn
anew.
"""

import itertools
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forebay.telemetry.analysis.report import Finding
from tests.telemetry.planted_log import PlannedRequest, PlannedStep, PlannedTurn, silence, write_log
from tests.telemetry.planted_shapes import Shape, clean_steps, draw_shape

_LEAST_COST = 0.1


@dataclass
class Truth:
    """What was planted."""

    causes: set[str]
    """Each of them is a right answer."""
    place: Mapping[str, object] = field(default_factory=dict)
    """The fields of a finding's path that must be equal."""
    excess_s: float | None = None
    """What was added to the requests that were waited for; None where nothing is usual."""
    saved_s: float | None = None
    """How much sooner the steps would have ended without it: at most ``excess_s``."""

    def misses(self, finding: Finding | None) -> str:
        """What is wrong with a report whose first finding is ``finding``; "" if nothing is."""
        if finding is None:
            return "nothing was found"
        wrong = [] if finding.cause in self.causes else ["cause"]
        wrong += [name for name, value in self.place.items() if getattr(finding.path, name) != value]
        return f"wrong {', '.join(wrong)}: [{finding.cause}] {finding.sentence}" if wrong else ""

    def is_priced(self, seconds: float) -> bool:
        """Whether ``seconds`` is within 15 % of what it cost, by either definition."""
        if self.excess_s is None or self.saved_s is None:
            return True
        return 0.85 * self.saved_s <= seconds <= 1.15 * self.excess_s


@dataclass
class Log:
    """A clean log, into which a kind plants its fault."""

    shape: Shape
    steps: list[PlannedStep]
    seed: int

    @property
    def rng(self) -> random.Random:
        return self.shape.rng

    def one_step(self) -> tuple[str, PlannedStep]:
        number = self.rng.randrange(len(self.steps))
        return str(number + 1), self.steps[number]

    def one_worker(self) -> str:
        return str(self.rng.randrange(self.shape.num_workers))

    def one_request(self, least_turns: int = 1) -> tuple[dict[str, object], PlannedRequest, PlannedStep]:
        """Anywhere, with its place."""
        name, step = self.one_step()
        found = [
            (worker, request)
            for worker, own in step.workers.items()
            for request in own
            if len(request.turns) >= least_turns
        ]
        if not found:
            return self.one_request(least_turns)
        worker, request = self.rng.choice(found)
        return {"step": name, "worker": worker, "request": request.request_id}, request, step


def plant(kind: str, seed: int, folder: Path) -> Truth:
    """Write the log of this kind and seed to ``folder``."""
    for attempt in itertools.count():
        shape = draw_shape(random.Random(f"{kind}-{seed}-{attempt}"))
        needs = NEEDS.get(kind)
        if needs is not None and not needs(shape):
            continue
        log = Log(shape, clean_steps(shape), seed)
        before = [step.seconds for step in log.steps]
        truth = KINDS[kind](log)
        costs = {step.seconds: step.seconds - usual_s for step, usual_s in zip(log.steps, before, strict=True)}
        affected_s = sum(seconds for seconds, cost_s in costs.items() if abs(cost_s) > 1e-6)
        if truth.saved_s is None:
            truth.saved_s = sum(costs.values())
            if truth.saved_s < _LEAST_COST * affected_s or not affected_s:
                continue
        write_log(folder, log.steps)
        return truth
    raise AssertionError


def _engine_s(request: PlannedRequest) -> float:
    return sum(turn.engine_s for turn in request.turns)


def _last(step: PlannedStep) -> PlannedRequest:
    return max(step.requests(), key=lambda request: request.end_s)


def stalled_turn(log: Log) -> Truth:
    """The second turn of a request takes 150 s more."""
    place, request, _ = log.one_request(2)
    request.turns[1].engine_s += 150.0
    return Truth({"stalled_engine"}, place | {"turn": 1}, 150.0)


def silent_worker(log: Log) -> Truth:
    """The engine of a worker gives nothing for a while."""
    name, step = log.one_step()
    worker = log.one_worker()
    begin_s = step.generated_s * log.rng.uniform(0.2, 0.6)
    lasts_s = max(step.generated_s * log.rng.uniform(0.6, 2.0), 10.0)
    silence(step, worker, begin_s, begin_s + lasts_s)
    return Truth({"stalled_engine"}, {"step": name, "worker": worker}, lasts_s)


def quarter_rate(log: Log) -> Truth:
    """One worker has a quarter of the others' rate, in all steps."""
    return _slow_worker(log, 4.0)


def slower_worker(log: Log) -> Truth:
    """One worker is 30 to 50 % slower, in all steps."""
    return _slow_worker(log, log.rng.uniform(1.3, 1.5))


def _slow_worker(log: Log, factor: float) -> Truth:
    worker = log.one_worker()
    excess_s = 0.0
    for step in log.steps:
        for request in step.workers[worker]:
            for turn in request.turns:
                turn.engine_s *= factor
        last = _last(step)
        if last in step.workers[worker]:
            excess_s += _engine_s(last) * (1 - 1 / factor)
    return Truth({"slow_engine"}, {"worker": worker}, excess_s)


def slow_request(log: Log) -> Truth:
    """One request gets its tokens 3.5 times slower."""
    place, request, _ = log.one_request()
    usual_s = _engine_s(request)
    for turn in request.turns:
        turn.engine_s *= 3.5
    return Truth({"slow_rate"}, place, 2.5 * usual_s)


def long_answer(log: Log) -> Truth:
    """One answer is very long, at the rate that all have."""
    place, request, step = log.one_request()
    usual_s = statistics.median(_engine_s(each) for each in step.requests())
    turn = log.rng.choice(request.turns)
    wanted_s = step.generated_s * log.rng.uniform(1.6, 3.0)
    turn.tokens = round(wanted_s * log.shape.speed)
    turn.engine_s = log.shape.engine_s(int(str(place["worker"])), turn.tokens)
    return Truth({"long_answer"}, place, _engine_s(request) - usual_s)


def slow_tool(log: Log) -> Truth:
    """One call of a tool takes very long."""
    place, request, step = log.one_request(2)
    number = log.rng.randrange(len(request.turns) - 1)
    lasts_s = max(step.generated_s * log.rng.uniform(0.8, 2.0), 15.0)
    request.turns[number].tool_s += lasts_s
    return Truth({"tool"}, place | {"turn": number}, lasts_s)


def slow_tools(log: Log) -> Truth:
    """Each call of a tool takes 12 s or more, and most of the step is spent on them."""
    usual_s = log.shape.typical_s
    lasts_s = max(12.0, 3.0 * usual_s) * log.rng.uniform(1.0, 1.3)
    for step in log.steps:
        for request in step.requests():
            for turn in request.turns[:-1]:
                turn.tool_s = lasts_s * log.rng.uniform(1.0, 1.2)
    return Truth({"tool"}, {}, sum(turn.tool_s for step in log.steps for turn in _last(step).turns))


def slow_reward(log: Log) -> Truth:
    """The reward of one request takes very long."""
    place, request, step = log.one_request()
    lasts_s = max(step.generated_s * log.rng.uniform(0.8, 2.0), 10.0)
    request.reward_s += lasts_s
    return Truth({"reward"}, place, lasts_s)


def slow_rewards(log: Log) -> Truth:
    """The reward of all requests of a step takes long."""
    name, step = log.one_step()
    lasts_s = step.generated_s * log.rng.uniform(0.2, 0.8)
    for request in step.requests():
        request.reward_s += lasts_s * log.rng.uniform(0.97, 1.03)
    return Truth({"reward"}, {"step": name}, lasts_s)


def uneven_workers(log: Log) -> Truth:
    """A worker has three times the requests, in one step or all.

    They share its rate, or come one after another, or wait in the queue of its engine.
    """
    worker = log.one_worker()
    name, step = log.one_step()
    is_always = log.seed % 2 == 0
    for each in log.steps if is_always else [step]:
        own = each.workers[worker]
        usual_s = max(request.seconds for request in own)
        more = [log.shape.request(int(worker)) for _ in range(2 * len(own))]
        for number, request in enumerate(more):
            waits_s = usual_s * (1 + number // len(own))
            if log.seed % 3 == 0:
                request.begin_s += waits_s
            elif log.seed % 3 == 1:
                request.turns[0].engine_s += waits_s
        own += more
        for turn in (turn for request in own for turn in request.turns if log.seed % 3 == 2):
            turn.engine_s *= 3
    planted = log.steps if is_always else [step]
    excess_s = sum(max(0.0, _late_s(each, worker)) for each in planted)
    return Truth({"barrier"}, {"worker": worker} | ({} if is_always else {"step": name}), excess_s)


def _late_s(step: PlannedStep, worker: str) -> float:
    """How long the other workers wait for ``worker``."""
    ends = {name: max(request.end_s for request in own) for name, own in step.workers.items()}
    return ends.pop(worker) - max(ends.values())


def constant_phase(log: Log) -> Truth:
    """Preprocessing takes long in every step, whatever is generated, while lengths vary from step to step."""
    rng = log.rng
    for step in log.steps:
        factor = 2 ** rng.uniform(-1.0, 1.0)
        for request in step.requests():
            for turn in request.turns:
                turn.tokens, turn.engine_s = round(turn.tokens * factor), turn.engine_s * factor
    usual_s = sum(step.generated_s for step in log.steps) / len(log.steps) * rng.uniform(0.3, 0.6)
    for step in log.steps:
        step.phases["preprocessing"] = usual_s * rng.uniform(0.97, 1.03)
    return Truth({"constant_phase"}, {"event": "preprocessing"}, usual_s * len(log.steps), usual_s * len(log.steps))


def slow_flush(log: Log) -> Truth:
    """The flush of the cache takes many times as long in one step."""
    name, step = log.one_step()
    more_s = step.seconds * log.rng.uniform(0.25, 1.5)
    step.phases["cache_flush"] += more_s
    return Truth({"slow_step"}, {"step": name, "event": "cache_flush"}, more_s)


def slow_preprocessing(log: Log) -> Truth:
    """The preprocessing of one worker takes long in one step."""
    name, step = log.one_step()
    worker = log.one_worker()
    more_s = step.seconds * log.rng.uniform(0.4, 1.5)
    step.own_phases[worker] = {"preprocessing": step.phases["preprocessing"] + more_s}
    return Truth({"slow_step"}, {"step": name, "worker": worker, "event": "preprocessing"}, more_s)


def slowing_engines(log: Log) -> Truth:
    """All engines become slower from step to step."""
    growth = log.rng.uniform(0.6, 1.5) / (len(log.steps) - 1)
    excess_s = 0.0
    for number, step in enumerate(log.steps):
        for request in step.requests():
            for turn in request.turns:
                turn.engine_s *= 1 + growth * number
        excess_s += _engine_s(_last(step)) * (1 - 1 / (1 + growth * number))
    return Truth({"slowing"}, {"event": "engine"}, excess_s)


def far_worker(log: Log) -> Truth:
    """Each call at one worker takes some seconds more, whatever its tokens."""
    worker = log.one_worker()
    more_s = log.shape.typical_s * log.rng.uniform(0.5, 1.0)
    excess_s = 0.0
    for step in log.steps:
        for request in step.workers[worker]:
            for turn in request.turns:
                turn.engine_s += more_s * log.rng.uniform(0.97, 1.03)
        last = _last(step)
        if last in step.workers[worker]:
            excess_s += more_s * len(last.turns)
    return Truth({"network"}, {"worker": worker}, excess_s)


def over_sampling(log: Log) -> Truth:
    """A tenth to a quarter of the requests of each worker is thrown away when the others have ended."""
    share = log.rng.uniform(0.12, 0.25)
    for step in log.steps:
        for own in step.workers.values():
            own.sort(key=lambda request: request.end_s)
            kept = len(own) - max(1, round(share * len(own)))
            end_s = own[kept - 1].end_s
            for request in own[kept:]:
                request.aborted_at_s = end_s
                tokens = round((end_s - request.begin_s) * log.shape.speed)
                request.turns = [PlannedTurn(tokens, end_s - request.begin_s)]
    return Truth({"over_sampling"}, saved_s=0.0)


KINDS: dict[str, Callable[[Log], Truth]] = {
    kind.__name__: kind
    for kind in (
        stalled_turn,
        silent_worker,
        quarter_rate,
        slower_worker,
        slow_request,
        long_answer,
        slow_tool,
        slow_tools,
        slow_reward,
        slow_rewards,
        uneven_workers,
        constant_phase,
        slow_flush,
        slow_preprocessing,
        slowing_engines,
        far_worker,
        over_sampling,
    )
}

NEEDS: dict[str, Callable[[Shape], bool]] = {
    "stalled_turn": lambda shape: shape.turns[1] >= 2,
    "slow_tool": lambda shape: shape.turns[1] >= 2,
    "slow_tools": lambda shape: shape.turns[0] >= 2,
    "constant_phase": lambda shape: shape.num_steps >= 6,
    "slowing_engines": lambda shape: shape.num_steps >= 6,
    "over_sampling": lambda shape: shape.per_worker >= 4,
    "far_worker": lambda shape: shape.per_worker * shape.num_steps * sum(shape.turns) >= 60,
}
"""What a log must have so that the fault can be told."""
