"""Models of engines, fitted to what a log tells of their calls: what a step takes, what a prompt does, how many fit."""

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
"""Places of an engine at whose door nobody was seen to wait."""
_FEW_ROUNDS = 8
_SEEN_WAITING = 0.01
"""Share of the engines' time: less of it in queues is the time of the way there."""
_CLEARLY = 0.05
"""By how much less squares a better model leaves."""
_LEAST_S = 1e-6
_RESERVES = tuple(tenths / 10 for tenths in range(11))
"""Shares of what calls may still sample that an engine may keep free."""


@dataclass(frozen=True)
class EngineFit:
    """What was fitted, and how."""

    costs: Mapping[str, EngineCost]
    """By engine, as the log calls them."""
    error: float
    """Of the time of a call, as a share: half of the calls are off by no more."""
    num_calls: int
    waiting_share: float
    """Of the time of all calls, that in engines' queues."""
    most_at_once: int
    """Calls of one engine that were seen to run at once."""
    is_limited_by: str
    """What calls waited for: ``places``, ``kv``, or nothing."""


def fit_engines(log: RolloutLog, kv_tokens: int | None = None) -> EngineFit:
    """The engines of ``log``. ``kv_tokens`` is the cache of one, where that is known better than it can be seen."""
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


# --- what calls take


def _times(traffic: Mapping[str, EngineTraffic]) -> tuple[EngineCost, dict[str, float], float]:
    """The cost that all have in common, each one's speed, and the error of a call. ``tool_s`` is that of the way."""
    rows = {name: each.rows() for name, each in traffic.items()}
    for _ in range(_FEW_ROUNDS):
        without = _solved({name: TimedCalls(each.seconds, each.factors[:, :3]) for name, each in rows.items()})
        step = without.factors[:2]
        if not step.any():
            break
        rows = {name: each.rows(float(step[0]), float(step[1])) for name, each in traffic.items()}
    solved = _solved(rows)
    if solved.misfit > without.misfit * (1 - _CLEARLY):  # a few tokens of a prompt are no different from a pause
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
    """What each factor takes, and the speed of each engine: by turns, until both agree."""
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
    """Prompt tokens a second, where engines tell when they read prompts."""
    tokens = sum(each.uncached for each in traffic.values())
    seconds = sum(each.prefill_s * speeds[name] for name, each in traffic.items())
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _ratio(predicted: float, measured: float) -> float:
    return max(_LEAST_S, float(predicted) / max(_LEAST_S, float(measured)))


# --- what fits


@dataclass(frozen=True)
class _Limits:
    places: int = NOTHING_WAITED
    kv_tokens: int | None = None
    kv_reserve: float = EngineCost().kv_reserve


def _limits(traffic: Iterable[EngineTraffic], shared_share: float, max_tokens: int) -> _Limits:
    """Places and tokens of an engine at which calls had to wait; only what held them up is a limit.

    Where it is the places, as many run whenever one that waited is let in; where it is the cache, as many tokens lie
    in it, or are kept free: of what running calls may still sample, the share for which these are most alike.
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


# --- what lies beside the engines


def _seconds_beside(rollouts: Iterable[RolloutSummary]) -> float:
    """Of each turn, in which no engine had anything to do for its rollout: tools, rewards, the way there and back."""
    seconds, turns = 0.0, 0
    for each in rollouts:
        if is_whole(each):
            in_engines = sum(call.left_s - call.begin_s for call in calls_of(each))
            seconds += max(0.0, busy_s(each) - in_engines)
            turns += len(each.turns)
    return seconds / max(1, turns)


def _cached_share(calls: Iterable[LoggedCall]) -> float:
    """Of prompts that their engine has seen: of a sibling, or of the turn before."""
    seen: set[tuple[str, object]] = set()
    cached = prompt = 0
    for call in calls:
        key = call.engine, call.group
        if key in seen:
            cached, prompt = cached + call.cached, prompt + call.prompt
        seen.add(key)
    return min(1.0, cached / prompt) if prompt else 0.0


def _shared_share(calls: Iterable[LoggedCall]) -> float:
    """Of a group's prompt, what its engine keeps once: the most that was in the cache for one of them.

    Those that come together find less in it, but it is theirs together once they have been read.
    """
    found: dict[object, list[LoggedCall]] = defaultdict(list)
    for call in calls:
        found[call.engine, call.group].append(call)
    groups = [group for group in found.values() if len(group) > 1]
    prompt = sum(min(each.prompt for each in group) for group in groups)
    cached = sum(min(max(each.cached for each in group), *(each.prompt for each in group)) for group in groups)
    return cached / prompt if prompt else 0.0
