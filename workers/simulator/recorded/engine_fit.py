"""Fits engine models to the calls in a log: the time of a step and of a prompt, and the number of calls that fit."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.telemetry.tracing.records import RolloutSummary
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.recorded.engine_traffic import EngineTraffic, TimedCalls
from forebay.workers.simulator.recorded.rollout_log import LoggedCall, RolloutLog, busy_s, calls_of, is_whole

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

NOTHING_WAITED = 1 << 16
"""Slots of an engine at which no call was seen to wait."""
_FEW_ROUNDS = 8
_SEEN_WAITING = 0.01
"""Smallest share of the calls' time in queues that counts as waiting; less is transport time."""
_CLEARLY = 0.05
"""Share by which a better model must reduce the sum of squares."""
_LEAST_S = 1e-6
_RESERVES = tuple(tenths / 10 for tenths in range(11))
"""Candidates for the share of the tokens still to be sampled that an engine keeps free."""


@dataclass(frozen=True)
class EngineFit:
    """Result and quality of a fit."""

    costs: Mapping[str, EngineCost]
    """Cost by the engine's name in the log."""
    error: float
    """Median error of a call's time, as a share of it."""
    num_calls: int
    waiting_share: float
    """Share of the time of all calls that was spent in engines' queues."""
    most_at_once: int
    """Most calls of one engine that ran at once."""
    is_limited_by: str
    """What calls waited for: ``places``, ``kv``, or "" for nothing."""


def fit_engines(log: RolloutLog, kv_tokens: int | None = None) -> EngineFit:
    """Fit the engines of ``log``. ``kv_tokens``: the cache size of one engine, if known."""
    calls = [call for call in log.calls if call.sampled and call.duration_s > 0]
    traffic = {name: EngineTraffic(own) for name, own in _by_engine(calls).items()}
    common, speeds, error = _times(traffic)
    waiting_share = sum(call.queue_s for call in calls) / max(_LEAST_S, sum(call.duration_s for call in calls))
    most = max(each.most_at_once for each in traffic.values())
    shared_share = _shared_share(calls)
    limits = _Limits()
    if waiting_share > _SEEN_WAITING:
        limits = _limits(traffic.values(), shared_share, int(log.settings.get("max_tokens") or 0))
    common = replace(
        common,
        places=limits.places,
        kv_tokens=kv_tokens or limits.kv_tokens,
        kv_reserve=limits.kv_reserve,
        tool_s=common.tool_s + _seconds_beside(log.rollouts),
        cached_share=_cached_share(log.calls),
        shared_share=shared_share,
    )
    costs = {name: replace(common, speed=speed) for name, speed in speeds.items()}
    limit = "kv" if common.kv_tokens is not None else "places" if limits.places < NOTHING_WAITED else ""
    return EngineFit(costs, error, len(calls), waiting_share, most, limit)


def _by_engine(calls: Iterable[LoggedCall]) -> dict[str, list[LoggedCall]]:
    found: dict[str, list[LoggedCall]] = defaultdict(list)
    for call in calls:
        found[call.engine].append(call)
    return dict(sorted(found.items()))


# --- times of calls


def _times(traffic: Mapping[str, EngineTraffic]) -> tuple[EngineCost, dict[str, float], float]:
    """Common cost, each engine's speed, and the error of a call. ``tool_s`` is the transport time of a call."""
    rows = {name: each.rows() for name, each in traffic.items()}
    for _ in range(_FEW_ROUNDS):
        without = _solved({name: TimedCalls(each.seconds, each.factors[:, :3]) for name, each in rows.items()})
        step = without.factors[:2]
        if not step.any():
            break
        rows = {name: each.rows(float(step[0]), float(step[1])) for name, each in traffic.items()}
    solved = _solved(rows)
    if solved.misfit > without.misfit * (1 - _CLEARLY):  # the cost of short prompts cannot be told from a pause
        solved = without
    step_s, per_sequence_s, pause_s, *rest = (float(each) for each in solved.factors)
    per_prompt_token_s = rest[0] if rest else 0.0
    rate = _measured_prefill_rate(traffic, solved.speeds) or (
        1 / per_prompt_token_s if per_prompt_token_s else math.inf
    )
    if step_s + per_sequence_s <= 0:
        step_s = _LEAST_S
    cost = EngineCost(prefill_tokens_per_s=rate, step_s=step_s, step_s_per_sequence=per_sequence_s, tool_s=pause_s)
    return cost, solved.speeds, solved.error


@dataclass(frozen=True)
class _Solved:
    factors: "NDArray[float64]"
    speeds: dict[str, float]
    misfit: float
    """Sum of squares."""
    error: float


def _solved(rows: Mapping[str, TimedCalls]) -> _Solved:
    """Solve for the time of each factor and the speed of each engine, alternately in a few rounds."""
    import numpy
    from scipy.optimize import nnls

    speeds = dict.fromkeys(rows, 1.0)
    factors = numpy.concatenate([each.factors for each in rows.values()])
    for _ in range(_FEW_ROUNDS if len(rows) > 1 else 1):
        found, _ = nnls(factors, numpy.concatenate([each.seconds * speeds[name] for name, each in rows.items()]))
        speeds = {name: _ratio((each.factors @ found).sum(), each.seconds.sum()) for name, each in rows.items()}
        middle = float(numpy.median(list(speeds.values())))
        speeds = {name: speed / middle for name, speed in speeds.items()} if len(rows) > 1 else dict.fromkeys(rows, 1.0)
    predicted = numpy.concatenate([each.factors @ found / speeds[name] for name, each in rows.items()])
    measured = numpy.concatenate([each.seconds for each in rows.values()])
    off = abs(predicted - measured)
    return _Solved(found, speeds, float((off**2).sum()), float(numpy.median(off / measured.clip(_LEAST_S))))


def _measured_prefill_rate(traffic: Mapping[str, EngineTraffic], speeds: Mapping[str, float]) -> float | None:
    """Prompt tokens per second, if engines report when they read prompts."""
    tokens = sum(each.uncached for each in traffic.values())
    seconds = sum(each.prefill_s * speeds[name] for name, each in traffic.items())
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _ratio(predicted: float, measured: float) -> float:
    return max(_LEAST_S, float(predicted) / max(_LEAST_S, float(measured)))


# --- limits


@dataclass(frozen=True)
class _Limits:
    places: int = NOTHING_WAITED
    kv_tokens: int | None = None
    kv_reserve: float = EngineCost().kv_reserve


def _limits(traffic: Iterable[EngineTraffic], shared_share: float, max_tokens: int) -> _Limits:
    """Limit of an engine's slots or cache at which calls had to wait; only the one that caused the waiting is set.

    If slots are the limit, the same number of calls runs whenever a waiting call is admitted. If the cache is, the same
    number of tokens is in it or kept free. The share kept free is the one for which these numbers vary least.
    """
    import numpy

    full = [each for one in traffic for each in one.after_waiting(shared_share, max_tokens)]
    if not full:
        return _Limits()
    running = [each.num for each in full]
    demands = {share: [each.tokens + share * each.left for each in full] for share in _RESERVES}
    reserve = min(_RESERVES, key=lambda share: _spread(demands[share]))
    if _spread(running) <= _spread(demands[reserve]):
        return _Limits(places=round(float(numpy.quantile(running, 0.9))))
    return _Limits(kv_tokens=max(2, round(float(numpy.quantile(demands[reserve], 0.95)))), kv_reserve=reserve)


def _spread(values: Sequence[float]) -> float:
    import numpy

    return float(numpy.std(values) / max(_LEAST_S, float(numpy.mean(values))))


# --- time outside engines


def _seconds_beside(rollouts: Iterable[RolloutSummary]) -> float:
    """Seconds per turn without work for an engine: tools, rewards and transport."""
    seconds, turns = 0.0, 0
    for each in rollouts:
        if is_whole(each):
            in_engines = sum(call.left_s - call.begin_s for call in calls_of(each))
            seconds += max(0.0, busy_s(each) - in_engines)
            turns += len(each.turns)
    return seconds / max(1, turns)


def _cached_share(calls: Iterable[LoggedCall]) -> float:
    """Cached share of prompts that their engine had seen, from a sibling or the previous turn."""
    seen: set[tuple[str, object]] = set()
    cached = prompt = 0
    for call in calls:
        key = call.engine, call.group
        if key in seen:
            cached, prompt = cached + call.cached, prompt + call.prompt
        seen.add(key)
    return min(1.0, cached / prompt) if prompt else 0.0


def _shared_share(calls: Iterable[LoggedCall]) -> float:
    """Share of a group's prompt that its engine keeps only once: the most that was cached for any of its calls.

    Calls that arrive together find less in the cache, but share it once their prompts have been read.
    """
    found: dict[object, list[LoggedCall]] = defaultdict(list)
    for call in calls:
        found[call.engine, call.group].append(call)
    groups = [group for group in found.values() if len(group) > 1]
    prompt = sum(min(each.prompt for each in group) for group in groups)
    cached = sum(min(max(each.cached for each in group), *(each.prompt for each in group)) for group in groups)
    return cached / prompt if prompt else 0.0
