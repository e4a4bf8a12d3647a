"""Sentences about all steps together: lengths at the cap, turns, rewards of slow requests, surplus requests."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from forebay.telemetry.analysis.report import StepSummary
from forebay.telemetry.numbers import seconds_text

_MOST = 0.5
_DIFFERS = 0.05
"""Mean rewards that differ less than this are treated as equal."""


def over_steps(steps: Sequence[StepSummary]) -> list[str]:
    """Complete sentences; facts that the log does not contain are left out."""
    return [*_cap(steps), *_turns(steps), *_rewards(steps), *_thrown(steps), *_broken(steps), *_discarded(steps)]


def _cap(steps: Sequence[StepSummary]) -> Iterator[str]:
    known = [step for step in steps if step.length_max is not None]
    reached = [step for step in known if step.share_at_cap]
    if reached:
        share = 100 * fmean(step.share_at_cap or 0.0 for step in known)
        longest = max(step.length_max or 0.0 for step in reached)
        text = f"The cap of {longest:,.0f} tokens is reached in {len(reached)} of {len(known)} steps, "
        yield (
            text + f"by {share:.1f} % of the answers; their mean is {fmean(s.length_mean or 0.0 for s in known):,.0f}."
        )


def _turns(steps: Sequence[StepSummary]) -> Iterator[str]:
    numbers: Counter[int] = Counter()
    seconds: dict[int, float] = defaultdict(float)
    for step in steps:
        numbers.update(step.requests_by_turns)
        for turns, mean_s in step.mean_seconds_by_turns.items():
            seconds[turns] += mean_s * step.requests_by_turns.get(turns, 0)
    total = numbers.total()
    if not total or len(numbers) < 2:
        return
    few = 0
    reached = 0
    for turns in sorted(numbers):
        few, reached = turns, reached + numbers[turns]
        if reached > _MOST * total:
            break
    noun = "turn" if few == 1 else "turns"
    times = ", ".join(f"{turns}: {seconds[turns] / numbers[turns]:.1f} s" for turns in sorted(numbers)[:6])
    yield f"{100 * reached / total:.0f} % of the requests have at most {few} {noun}; mean time by turns: {times}."


def _rewards(steps: Sequence[StepSummary]) -> Iterator[str]:
    known = [step for step in steps if step.reward_of_slowest is not None and step.reward_of_rest is not None]
    if not known:
        return
    slowest = fmean(step.reward_of_slowest or 0.0 for step in known)
    rest = fmean(step.reward_of_rest or 0.0 for step in known)
    if abs(slowest - rest) > _DIFFERS * max(abs(slowest), abs(rest)):
        yield f"The slowest 20 % of the requests have a mean reward of {slowest:.3f}, the rest {rest:.3f}."


def _thrown(steps: Sequence[StepSummary]) -> Iterator[str]:
    thrown = sum(step.thrown_requests for step in steps)
    if thrown:
        total = sum(step.num_requests for step in steps)
        seconds = sum(step.thrown_s for step in steps)
        tokens = sum(step.thrown_tokens for step in steps)
        yield f"{thrown:,} of {total:,} requests were thrown away: {seconds_text(seconds)} and {tokens:,} tokens."


def _broken(steps: Sequence[StepSummary]) -> Iterator[str]:
    if broken := sum(step.broken_attempts for step in steps):
        seconds = sum(step.broken_s for step in steps)
        tokens = sum(step.broken_tokens for step in steps)
        cost = f"{seconds_text(seconds)} and {tokens:,} tokens"
        yield f"{broken:,} attempts were stopped at their cap and run again: {cost}."


def _discarded(steps: Sequence[StepSummary]) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    for step in steps:
        reasons.update(step.discarded_requests)
    if reasons:
        why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
        seconds = sum(step.discarded_s for step in steps)
        tokens = sum(step.discarded_tokens for step in steps)
        total = sum(step.num_requests for step in steps)
        yield (
            f"{reasons.total():,} of {total:,} requests were in groups that were discarded ({why}): "
            f"{seconds_text(seconds)} and {tokens:,} tokens."
        )
