"""Summarises one step: its three times, requests by worker and by turns, lengths, rewards, and discarded work.

A request's time is exclusive: its phases add up, however its spans overlapped.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil

from forebay.core.group import DiscardReason
from forebay.telemetry.analysis.critical_path import CriticalPath
from forebay.telemetry.analysis.intervals import covered
from forebay.telemetry.analysis.report import StepSummary
from forebay.telemetry.analysis.robust import percentile
from forebay.telemetry.analysis.timeline import SURPLUS, ProfileStep, Request

ENGINE_PHASES = frozenset({"engine", "engine_queue", "prefill", "decode"})
_OF_REQUESTS = ("barrier_wait", "async_generate", "engine_async_generate")
"""Phases of workers in which requests run, or which wait for them."""
GIVEN_UP = frozenset(DiscardReason) - {DiscardReason.STALE}
"""Reasons for discarding a group because of its content. A stale group was never needed, so it counts as surplus."""
SLOWEST = 0.2
"""The share of requests whose rewards are compared with those of the rest."""


def summarise(step: ProfileStep, path: CriticalPath) -> StepSummary:
    """The summary of ``step``, which may be limited to one worker; ``path`` is that of the whole step."""
    summary = StepSummary(name=step.name, begin_s=step.begin_s, seconds=step.duration_s, is_open=step.is_open)
    _add_times(summary, step)
    summary.critical_path, summary.beyond_next_s = path.parts, path.beyond_next_s
    _add_outside(summary, step)
    _add_requests(summary, step)
    _add_phases(summary, step)
    _add_lengths(summary, step)
    _add_rewards(summary, step.requests)
    _add_thrown(summary, step)
    _add_turns(summary, step.requests)
    summary.group_skew = _group_skew(step.requests)
    return summary


def _add_times(summary: StepSummary, step: ProfileStep) -> None:
    if step.asked_s is None or step.satisfied_s is None:
        return
    spans = [(read.asked_s, read.satisfied_s, read.sent_s) for read in step.reads]
    spans = spans or [(step.asked_s, step.satisfied_s, step.end_s)]
    waits = [_clipped(asked, satisfied, step) for asked, satisfied, _ in spans]
    busy = [_clipped(asked, sent, step) for asked, _, sent in spans]
    summary.wait_s = covered(waits)
    summary.send_s = covered(busy) - summary.wait_s
    summary.train_s = step.duration_s - summary.wait_s - summary.send_s


def _add_outside(summary: StepSummary, step: ProfileStep) -> None:
    for phases in step.worker_phases.values():
        for name, seconds in phases.items():
            if name not in _OF_REQUESTS:
                summary.worker_s[name] = max(summary.worker_s.get(name, 0.0), seconds)
    train = {} if summary.train_s is None else {"train": summary.train_s}
    summary.outside_s = {**train, **step.delivery_phases, **summary.worker_s}


def _clipped(begin: float, end: float, step: ProfileStep) -> tuple[float, float]:
    return min(max(begin, step.begin_s), step.end_s), min(max(end, step.begin_s), step.end_s)


def _add_requests(summary: StepSummary, step: ProfileStep) -> None:
    summary.num_requests = len(step.requests) + step.num_unlisted
    summary.num_used = sum(request.is_used for request in step.requests)
    summary.num_used += step.num_unlisted - step.num_unlisted_thrown
    for request in step.requests:
        summary.requests_by_worker[request.worker] = summary.requests_by_worker.get(request.worker, 0) + 1
    summary.requests_by_worker = dict(sorted(summary.requests_by_worker.items()))
    for worker, phases in sorted(step.worker_phases.items()):
        if "barrier_wait" in phases:
            summary.barrier_s[worker] = phases["barrier_wait"]


def _add_phases(summary: StepSummary, step: ProfileStep) -> None:
    of_workers = any(phases.keys() - {"barrier_wait"} for phases in step.worker_phases.values())
    each = step.worker_phases.values() if of_workers else [request.phases for request in step.requests]
    seconds: dict[str, float] = {}
    for phases in each:
        for name, value in phases.items():
            seconds[name] = seconds.get(name, 0.0) + value
    total = sum(seconds.values())
    summary.phase_seconds = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    if total > 0:
        summary.phase_shares = {name: 100.0 * value / total for name, value in summary.phase_seconds.items()}


def _add_lengths(summary: StepSummary, step: ProfileStep) -> None:
    finished = [request for request in step.requests if request.ending == "finished"]
    lengths = sorted(request.sampled_tokens for request in finished if request.sampled_tokens)
    lengths = lengths or sorted(step.response_tokens)
    if lengths:
        cap = step.length_cap or float("inf")
        num_capped = sum(request.is_capped or request.sampled_tokens >= cap for request in finished)
        summary.length_min, summary.length_max = lengths[0], lengths[-1]
        summary.length_mean = sum(lengths) / len(lengths)
        summary.length_median, summary.length_p95 = percentile(lengths, 50), percentile(lengths, 95)
        summary.share_at_cap = num_capped / len(lengths)
    tokens = sum(request.sampled_tokens for request in step.requests)
    if tokens and step.duration_s > 0:
        summary.tokens_per_s = tokens / step.duration_s
    prompt = sum(request.prompt_tokens for request in step.requests)
    if prompt:
        summary.cache_hit_rate = sum(request.cached_tokens for request in step.requests) / prompt


def _add_rewards(summary: StepSummary, requests: Iterable[Request]) -> None:
    by_duration = sorted((request.duration_s, request.reward) for request in requests if request.reward is not None)
    rewards = [reward for _, reward in by_duration]
    if rewards:
        summary.reward_mean = sum(rewards) / len(rewards)
    if len(rewards) > 1:
        num_slow = ceil(SLOWEST * len(rewards))
        summary.reward_of_slowest = sum(rewards[-num_slow:]) / num_slow
        summary.reward_of_rest = sum(rewards[:-num_slow]) / (len(rewards) - num_slow)


def _add_thrown(summary: StepSummary, step: ProfileStep) -> None:
    """Count surplus of over-sampling and, separately, discarded groups. Failed requests are not surplus."""
    unused = {
        request.request_id: request
        for request in step.requests
        if not request.is_used and request.ending in (*SURPLUS, "finished")
    }
    thrown = {name: request for name, request in unused.items() if request.discarded not in GIVEN_UP}
    summary.thrown_requests = len(thrown) + step.num_unlisted_thrown
    summary.thrown_tokens = sum(request.sampled_tokens for request in thrown.values())
    for request in thrown.values():
        summary.thrown_s += _seconds_in(step, request)
    for request in step.requests:
        summary.broken_attempts += request.num_broken
        summary.broken_s += request.broken_s
        summary.broken_tokens += request.broken_tokens
    given_up = [request for name, request in unused.items() if name not in thrown]
    summary.discarded_requests = dict(Counter(request.discarded for request in given_up))
    summary.discarded_s = sum(_seconds_in(step, request) for request in given_up)
    summary.discarded_tokens = sum(request.sampled_tokens for request in given_up)


def _seconds_in(step: ProfileStep, request: Request) -> float:
    begin, end = _clipped(request.begin_s, request.end_s, step)
    return end - begin


def _add_turns(summary: StepSummary, requests: Iterable[Request]) -> None:
    durations: dict[int, list[float]] = {}
    engine: dict[int, list[float]] = {}
    for request in requests:
        if request.ending in (*SURPLUS, "open"):
            continue
        durations.setdefault(len(request.turns), []).append(request.duration_s)
        for turn in request.turns:
            seconds = sum(value for name, value in turn.phases.items() if name in ENGINE_PHASES)
            engine.setdefault(turn.number, []).append(seconds)
    summary.requests_by_turns = {number: len(each) for number, each in sorted(durations.items()) if number}
    summary.mean_seconds_by_turns = {
        number: sum(each) / len(each) for number, each in sorted(durations.items()) if number
    }
    summary.engine_seconds_by_turn = {number: sum(each) / len(each) for number, each in sorted(engine.items())}


def _group_skew(requests: Iterable[Request]) -> float | None:
    ends: dict[str, list[float]] = {}
    for request in requests:
        if request.group and request.ending == "finished":
            ends.setdefault(request.group, []).append(request.end_s)
    skews = [max(each) - min(each) for each in ends.values() if len(each) > 1]
    return sum(skews) / len(skews) if skews else None
