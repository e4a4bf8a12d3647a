"""Summarises steps: their three times, requests by worker and by turns, lengths, rewards, and discarded work.

A request's time is exclusive: its phases add up, however its spans overlapped.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil
from statistics import fmean

from forebay.core.group import DiscardReason
from forebay.telemetry.analysis.critical_path import CriticalPath
from forebay.telemetry.analysis.intervals import covered
from forebay.telemetry.analysis.report import StepSummary
from forebay.telemetry.analysis.robust import percentile
from forebay.telemetry.analysis.timeline import SURPLUS, ProfileStep, Request
from forebay.telemetry.numbers import counted

_ENGINE_PHASES = ("engine", "engine_queue", "prefill", "decode")
_OF_REQUESTS = ("barrier_wait", "async_generate", "engine_async_generate")
"""Phases of workers in which requests run, or which wait for them."""
_GIVEN_UP = frozenset(DiscardReason) - {DiscardReason.STALE}
"""Reasons for discarding a group because of its content. A stale group was never needed, so it counts as surplus."""
_SLOWEST = 0.2
"""The share of requests whose rewards are compared with those of the rest."""
_DIFFERS = 0.05
"""Mean rewards that differ less than this are treated as equal."""
_MOST = 0.5
"""The share of requests that "most" have at least."""


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
    summary.requests_by_worker = dict(sorted(Counter(request.worker for request in step.requests).items()))
    barriers = {worker: phases.get("barrier_wait") for worker, phases in sorted(step.worker_phases.items())}
    summary.barrier_s = {worker: seconds for worker, seconds in barriers.items() if seconds is not None}


def _add_phases(summary: StepSummary, step: ProfileStep) -> None:
    of_workers = any(phases.keys() - {"barrier_wait"} for phases in step.worker_phases.values())
    seconds: dict[str, float] = defaultdict(float)
    for phases in step.worker_phases.values() if of_workers else (request.phases for request in step.requests):
        for name, value in phases.items():
            seconds[name] += value
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


def _add_rewards(summary: StepSummary, requests: Sequence[Request]) -> None:
    names = dict.fromkeys(name for request in requests for name in request.reward_parts)
    for name in names:
        parts = [request.reward_parts[name] for request in requests if name in request.reward_parts]
        summary.reward_parts[name] = sum(parts) / len(parts)
    by_duration = sorted((request.duration_s, request.reward) for request in requests if request.reward is not None)
    rewards = [reward for _, reward in by_duration]
    if rewards:
        summary.reward_mean = sum(rewards) / len(rewards)
    if len(rewards) > 1:
        num_slow = ceil(_SLOWEST * len(rewards))
        summary.reward_of_slowest = sum(rewards[-num_slow:]) / num_slow
        summary.reward_of_rest = sum(rewards[:-num_slow]) / (len(rewards) - num_slow)


def _add_thrown(summary: StepSummary, step: ProfileStep) -> None:
    """Count surplus of over-sampling and, separately, discarded groups. Failed requests are not surplus."""
    unused = {
        request.request_id: request
        for request in step.requests
        if not request.is_used and request.ending in (*SURPLUS, "finished")
    }
    thrown = [request for request in unused.values() if request.discarded not in _GIVEN_UP]
    given_up = [request for request in unused.values() if request.discarded in _GIVEN_UP]
    summary.thrown_requests = len(thrown) + step.num_unlisted_thrown
    summary.thrown_s, summary.thrown_tokens = _spent(step, thrown)
    kept = [request for request in step.requests if request.request_id not in unused]
    summary.broken_attempts = sum(request.num_broken for request in kept)
    summary.broken_s = sum(request.broken_s for request in kept)
    summary.broken_tokens = sum(request.broken_tokens for request in kept)
    summary.discarded_requests = dict(Counter(request.discarded for request in given_up))
    summary.discarded_s, summary.discarded_tokens = _spent(step, given_up)


def _spent(step: ProfileStep, requests: Iterable[Request]) -> tuple[float, int]:
    """The seconds in this step, and the tokens, of all ``requests``."""
    seconds, tokens = 0.0, 0
    for request in requests:
        begin, end = _clipped(request.begin_s, request.end_s, step)
        seconds += end - begin
        tokens += request.sampled_tokens
    return seconds, tokens


def _add_turns(summary: StepSummary, requests: Iterable[Request]) -> None:
    durations: dict[int, list[float]] = defaultdict(list)
    engine: dict[int, list[float]] = defaultdict(list)
    for request in requests:
        if request.ending not in (*SURPLUS, "open"):
            if request.turns:
                durations[len(request.turns)].append(request.duration_s)
            for turn in request.turns:
                engine[turn.number].append(sum(turn.phases.get(name, 0.0) for name in _ENGINE_PHASES))
    summary.requests_by_turns = {number: len(each) for number, each in sorted(durations.items())}
    summary.mean_seconds_by_turns = {number: sum(each) / len(each) for number, each in sorted(durations.items())}
    summary.engine_seconds_by_turn = {number: sum(each) / len(each) for number, each in sorted(engine.items())}


def _group_skew(requests: Iterable[Request]) -> float | None:
    ends: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        if request.group and request.ending == "finished":
            ends[request.group].append(request.end_s)
    skews = [max(each) - min(each) for each in ends.values() if len(each) > 1]
    return sum(skews) / len(skews) if skews else None


def over_steps(steps: Sequence[StepSummary]) -> list[str]:
    """What is true of all steps: complete sentences, without facts that the log does not contain."""
    return [*_cap(steps), *_turns(steps), *_rewards(steps)]


def _cap(steps: Sequence[StepSummary]) -> Iterator[str]:
    known = [step for step in steps if step.length_max is not None]
    reached = [step for step in known if step.share_at_cap]
    if reached:
        share = 100 * fmean(step.share_at_cap or 0.0 for step in known)
        longest = max(step.length_max or 0.0 for step in reached)
        mean = fmean(step.length_mean or 0.0 for step in known)
        times = f"{len(reached)} of {len(known)} steps, by {share:.1f} % of the answers"
        yield f"The cap of {longest:,.0f} tokens is reached in {times}; their mean is {mean:,.0f}."


def _turns(steps: Sequence[StepSummary]) -> Iterator[str]:
    numbers: Counter[int] = Counter()
    seconds: dict[int, float] = defaultdict(float)
    for step in steps:
        numbers.update(step.requests_by_turns)
        for turns, mean_s in step.mean_seconds_by_turns.items():
            seconds[turns] += mean_s * step.requests_by_turns.get(turns, 0)
    if len(numbers) < 2:
        return
    ordered = sorted(numbers)
    reached = [number / numbers.total() for number in accumulate(numbers[turns] for turns in ordered)]
    few, share = next((turns, share) for turns, share in zip(ordered, reached, strict=True) if share > _MOST)
    times = ", ".join(f"{turns}: {seconds[turns] / numbers[turns]:.1f} s" for turns in ordered[:6])
    yield f"{100 * share:.0f} % of the requests have at most {counted(few, 'turn')}; mean time by turns: {times}."


def _rewards(steps: Sequence[StepSummary]) -> Iterator[str]:
    slow = [step.reward_of_slowest for step in steps if step.reward_of_slowest is not None]
    others = [step.reward_of_rest for step in steps if step.reward_of_rest is not None]
    if slow and others:
        slowest, rest = fmean(slow), fmean(others)
        if abs(slowest - rest) > _DIFFERS * max(abs(slowest), abs(rest)):
            yield f"The slowest 20 % of the requests have a mean reward of {slowest:.3f}, the rest {rest:.3f}."
